"""Constraint -> grammar of llguidance (Lark), with texts that its patterns match as hints.

Tool calls in the Kimi format (facts/kimi-facts.md 1.4): the section's markers are special ids, a
call's id is functions.NAME:IDX and IDX counts on from ``first_index``. In the Hermes format
(facts/sandboxes.md 3.1) the markers are ids where the vocabulary has them, else text, and then text
before a call cannot spell one. JSON ``text`` of a tool_calls constraint, beside engine.runtime's
keys: ``first_index`` (0), ``max_calls`` (8), ``parallel`` (true), ``reasoning``: "none" (default),
"opened" (the header opened <think>, the turn must close it) or "opens" (the turn may open one).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.chat.hermes import CALL_CLOSE, CALL_OPEN
from engine.chat.markers import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK_BEGIN,
    THINK_END,
)
from engine.chat.vocabulary import Vocabulary
from engine.constrain.hints import shortest_match
from engine.constrain.schema import parse_schema, patterns, prepared
from engine.errors import ConstraintError, NotSupportedError
from engine.runtime.types import Constraint

_TOOL_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As the formats write calls."""
_FREE_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""White space is free, but does not run on for ever."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_KEYS = {"tools", "choice", "style", "first_index", "max_calls", "parallel", "reasoning"}
MAX_CALLS = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """``lark`` for llguidance; ``hints``: texts that satisfy patterns in it."""

    lark: str
    hints: tuple[bytes, ...] = ()


def grammar_of(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    """ConstraintError for a text that names no grammar; NotSupportedError when the vocabulary lacks
    the markers of the format."""
    text = constraint.text
    match constraint.kind:
        case "json_schema":
            schema = prepared(parse_schema(text))
            return Grammar(f"start: {_json(schema, _FREE_JSON)}\n", _hints([schema]))
        case "regex":
            shortest = shortest_match(text)
            hints = () if shortest is None else (shortest.encode(),)
            return Grammar(f"start: TEXT\nTEXT: {_regex(text)}\n", hints)
        case "grammar":
            return Grammar(text)
        case "tool_calls":
            return _tool_calls(_request(text), vocabulary)
    raise ConstraintError(
        f"constraint kind {constraint.kind!r}; expected json_schema, regex, grammar or tool_calls"
    )


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _hints(schemas: list[Any]) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for pattern in dict.fromkeys(p for schema in schemas for p in patterns(schema)):
        shortest = shortest_match(pattern)
        if shortest:
            # as it stands inside a JSON string
            found.append(json.dumps(shortest, ensure_ascii=False)[1:-1].encode())
    return tuple(found)


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    if not pattern:
        return '""'
    # \\d as people mean it, not every digit of Unicode
    return f"/{regex_to_lark(pattern, use_ascii='d')}/"


@dataclass(frozen=True, slots=True)
class _Tools:
    """name -> prepared schema of its arguments."""

    schemas: dict[str, Any]
    style: str
    required: bool
    first_index: int
    max_calls: int
    reasoning: str


def _request(text: str) -> _Tools:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConstraintError(f"tool_calls: not JSON ({error})") from error
    if not isinstance(given, dict) or not set(given) <= _KEYS or not given.get("tools"):
        raise ConstraintError(
            f"tool_calls: {text[:60]!r}, expected a JSON object with tools (at least one) and "
            f"nothing beside {', '.join(sorted(_KEYS))}"
        )
    schemas: dict[str, Any] = {}
    for number, tool in enumerate(given["tools"]):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ConstraintError(
                f"tool_calls: tools[{number}] has no name; expected OpenAI's form"
            )
        if name in schemas:
            raise ConstraintError(f"tool_calls: two tools are named {name!r}; rename one")
        parameters = function.get("parameters")
        parameters = _NO_PARAMETERS if parameters is None else parameters
        schemas[name] = prepared(parameters, f"tool {name}", closed=True)
    choice = given.get("choice", "auto")
    if isinstance(choice, dict):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        if name not in schemas:
            raise ConstraintError(
                f"tool_calls: choice names {name!r}; expected one of {', '.join(schemas)}"
            )
        schemas = {name: schemas[name]}
    elif choice not in ("auto", "required"):
        raise ConstraintError(
            f'tool_calls: choice {choice!r}, expected "auto", "required" or {{"name": ...}}'
        )
    one = isinstance(choice, dict) or not given.get("parallel", True)
    max_calls = 1 if one else given.get("max_calls", 8)
    first_index, style = given.get("first_index", 0), given.get("style", "kimi")
    reasoning = given.get("reasoning", "none")
    if not (
        isinstance(max_calls, int)
        and 1 <= max_calls <= MAX_CALLS
        and isinstance(first_index, int)
        and first_index >= 0
        and style in ("kimi", "hermes")
        and reasoning in ("none", "opened", "opens")
    ):
        raise ConstraintError(
            f"tool_calls: max_calls={max_calls}, first_index={first_index}, style={style!r}, "
            f"reasoning={reasoning!r}; expected 1 to {MAX_CALLS}, 0 or more, kimi or hermes, and "
            "none, opened or opens"
        )
    return _Tools(schemas, style, choice != "auto", first_index, max_calls, reasoning)


def _tool_calls(tools: _Tools, vocabulary: Vocabulary) -> Grammar:
    rules = _kimi(tools, vocabulary) if tools.style == "kimi" else _hermes(tools, vocabulary)
    prefix = ""
    if tools.reasoning != "none":
        _need(vocabulary, (THINK_BEGIN, THINK_END), "reasoning")
        opened = f"THOUGHT? {THINK_END}"
        prefix = "reasoning "
        rules.append(
            f"reasoning: {opened}"
            if tools.reasoning == "opened"
            else f"reasoning: ({THINK_BEGIN} {opened})?"
        )
        rules.append(r"THOUGHT: /(.|\n)+/")
    body = "calls" if tools.required else "TEXT? calls?"
    for number, schema in enumerate(tools.schemas.values()):
        rules.append(f"args_{number}: {_json(schema, _TOOL_JSON)}")
    lark = "\n".join([f"start: {prefix}{body}", *rules]) + "\n"
    return Grammar(lark, _hints(list(tools.schemas.values())))


def _kimi(tools: _Tools, vocabulary: Vocabulary) -> list[str]:
    markers = (SECTION_BEGIN, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END, SECTION_END)
    _need(vocabulary, markers, "tool_calls in the Kimi format")
    rules = [f"calls: {SECTION_BEGIN} call_0 {SECTION_END}", r"TEXT: /(.|\n)+/"]
    for call in range(tools.max_calls):
        variants = [
            f"{_quoted(f'functions.{name}:{tools.first_index + call}')} {ARGUMENT_BEGIN} args_{n}"
            for n, name in enumerate(tools.schemas)
        ]
        more = f" call_{call + 1}?" if call + 1 < tools.max_calls else ""
        rules.append(f"call_{call}: {CALL_BEGIN} ({' | '.join(variants)}) {CALL_END}{more}")
    return rules


def _hermes(tools: _Tools, vocabulary: Vocabulary) -> list[str]:
    has_ids = CALL_OPEN in vocabulary.special_names and CALL_CLOSE in vocabulary.special_names
    opened, closed = (CALL_OPEN, CALL_CLOSE) if has_ids else map(_quoted, (CALL_OPEN, CALL_CLOSE))
    variants = []
    for number, name in enumerate(tools.schemas):
        head = "\n" + '{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '
        variants.append(f"{_quoted(head)} args_{number}")
    more = ""
    for _ in range(tools.max_calls - 1):
        more = f' ("\\n" call{more})?'
    text = r"/(.|\n)+/" if has_ids else rf"/(.|\n)+/ & ~/(.|\n)*{CALL_OPEN}(.|\n)*/"
    return [
        f"calls: call{more}",
        f"call: {opened} ({' | '.join(variants)}) {_quoted('}' + chr(10))} {closed}",
        f"TEXT: {text}",
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _need(vocabulary: Vocabulary, markers: tuple[str, ...], what: str) -> None:
    missing = [marker for marker in markers if marker not in vocabulary.special_names]
    if missing:
        raise NotSupportedError(
            f"{what}: this vocabulary lacks {missing[0]}; use a model and tokenizer that have it, "
            "or another style"
        )
