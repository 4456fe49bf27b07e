"""JSON as models write it: strict within limits, then the few repairs that cannot change a value.

Allowed repairs (facts/sandboxes.md 3.3): code fence, byte-order mark, raw control characters in
strings, trailing commas, True/False/None, closers missing at the very end, equal duplicate keys,
the whole text encoded as a string. Everything is one pass of a regular expression or of Python's
JSON scanner, so time is linear.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from sandbox.calls.types import quote

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_KEYS = 256
"""Of one object."""
MAX_ENCODINGS = 2
"""How often the whole text may have been encoded as a string."""

_SPACE = " \t\r\n"
# Strings are matched whole, so nothing inside them counts. The closing quote is optional and the
# repetition possessive: no quote is ever matched twice, so the scan is linear.
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_PIECE = re.compile(
    r'"(?:[^"\\]|\\.)*+(?P<closed>"?)'
    r"|,(?=[ \t\r\n]*[\]}])"
    r"|(?<!\w)(?:True|False|None)(?!\w)"
    r"|[\[\]{}]",
    re.DOTALL,
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_LANGUAGE = re.compile(r"[A-Za-z0-9_+-]*[ \t\r]*\Z")


@dataclass(frozen=True, slots=True)
class JsonText:
    """A value and the repair tags it took; ``whole_floats``: it holds a float such as 3.0."""

    value: Any
    repairs: tuple[str, ...] = ()
    whole_floats: bool = False


@dataclass(frozen=True, slots=True)
class JsonProblem:
    """Why there is no value: ``reason`` for machines, ``message`` for the model."""

    reason: str
    message: str


class _Refused(ValueError):
    """A value JSON's grammar allows to pass Python's parser but we do not."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.problem = JsonProblem(reason, message)


def read_json(text: str, *, repair: bool, truncated: bool = False) -> JsonText | JsonProblem:
    """The value that ``text`` spells. ``truncated``: the writer was cut off, so nothing is closed
    for it.

    Refused in any case: NaN, Infinity, numbers that overflow (1e999), unequal duplicate keys, lone
    surrogates; more than 1 MiB, 32 levels or 256 keys in an object. Never raises.
    """
    try:
        read = _read(text, repair, truncated)
        for _ in range(MAX_ENCODINGS):
            if not (repair and isinstance(read.value, str)):
                break
            if read.value.strip(_SPACE)[:1] not in ("{", "[", '"'):
                break  # plain words, not a value in disguise
            inner = _read(read.value, repair, False)
            tags = dict.fromkeys((*read.repairs, *inner.repairs, "json:double_encoded"))
            read = JsonText(inner.value, tuple(tags), inner.whole_floats)
    except _Refused as refused:
        return refused.problem
    return read


def deepest(text: str) -> int:
    """Deepest nesting of brackets outside strings; linear in the length of ``text``."""
    depth = most = 0
    for match in _BRACKET.finditer(text):
        bracket = match[0]
        if bracket in ("[", "{"):
            depth += 1
            if depth > most:
                most = depth
        elif bracket in ("]", "}"):
            depth -= 1
    return most


def _read(text: str, repair: bool, truncated: bool) -> JsonText:
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _Refused("too_long", f"arguments are longer than {MAX_BYTES} bytes")
    if text.count("[") + text.count("{") > MAX_DEPTH and (depth := deepest(text)) > MAX_DEPTH:
        raise _Refused("too_deep", f"arguments are nested {depth} deep; at most {MAX_DEPTH}")
    if _SURROGATE.search(text):
        raise _Refused("surrogate", "arguments hold half of a surrogate pair")
    if repair and not text.strip(_SPACE):
        return JsonText({}, ("json:empty",))
    parser = _Parser(repair)
    try:
        return parser.parse(text, ())
    except json.JSONDecodeError as error:
        if not repair:
            raise _Refused(*_why(error, text)) from error
    return _read_mended(parser, text, truncated)


def _read_mended(parser: _Parser, text: str, truncated: bool) -> JsonText:
    tags: list[str] = []
    body = text.strip(_SPACE)
    if body.startswith("\ufeff"):
        body = body.removeprefix("\ufeff").strip(_SPACE)
        tags.append("json:bom")
    if (inside := _unfenced(body)) is not None:
        body = inside
        tags.append("json:fence")
    body = _mend(body, tags, truncated)
    try:
        return parser.parse(body, tuple(tags))
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Invalid control character"):
            raise _Refused(*_why(error, text)) from error
    tags.append("json:control_characters")
    try:
        return parser.parse(body, tuple(tags), strict=False)
    except json.JSONDecodeError as error:
        raise _Refused(*_why(error, text)) from error


def _mend(text: str, tags: list[str], truncated: bool) -> str:
    """Trailing commas and Python's literals replaced, missing closers added; strings untouched."""
    pieces: list[str] = []
    begin = 0
    open_: list[str] = []
    found: dict[str, None] = {}
    for match in _PIECE.finditer(text):
        piece = match[0]
        first = piece[0]
        if first == '"':
            if not match["closed"]:
                raise _Refused("truncated_in_string", "arguments end inside a string")
        elif first in "[{":
            open_.append("]" if first == "[" else "}")
        elif first in "]}":
            if open_:
                open_.pop()
        else:
            pieces += (text[begin : match.start()], _LITERALS.get(piece, ""))
            begin = match.end()
            found["json:trailing_comma" if first == "," else "json:python_literal"] = None
    tags += found
    pieces.append(text[begin:])
    if open_:
        last = text[-1:]
        if truncated or last in (",", ":"):
            raise _Refused("truncated", f"arguments end before {quote(open_[-1])} was written")
        pieces += reversed(open_)
        tags.append("json:missing_closer")
    return "".join(pieces)


def _unfenced(text: str) -> str | None:
    """What stands inside a code fence around the whole text."""
    if not (text.startswith("```") and text.endswith("```") and len(text) >= 6):
        return None
    head, newline, rest = text[3:-3].partition("\n")
    inside = rest if newline and _LANGUAGE.match(head) else text[3:-3]
    return inside.strip(_SPACE)


def _why(error: json.JSONDecodeError, text: str) -> tuple[str, str]:
    open_ = 0
    for match in _PIECE.finditer(text):
        if match[0][0] == '"' and not match["closed"]:
            return "truncated_in_string", "arguments are not valid JSON: they end inside a string"
        open_ += (match[0] in "[{") - (match[0] in "]}")
    reason = "truncated" if open_ > 0 and error.pos >= len(text.rstrip(_SPACE)) else "syntax"
    return reason, f"arguments are not valid JSON: {error.msg} at character {error.pos}"


class _Parser:
    """Python's scanner with hooks that refuse what JSON does not have."""

    def __init__(self, repair: bool) -> None:
        self._repair = repair
        self._whole_floats = False
        self._equal_duplicates = False

    def parse(self, text: str, tags: tuple[str, ...], strict: bool = True) -> JsonText:
        """JSONDecodeError where the grammar is broken, _Refused for everything else."""
        try:
            value = json.loads(
                text,
                strict=strict,
                object_pairs_hook=self._object,
                parse_constant=_constant,
                parse_float=self._float,
            )
        except (json.JSONDecodeError, _Refused):
            raise
        except ValueError as error:  # CPython refuses integers of more than 4300 digits
            raise _Refused(
                "number_too_long", "arguments hold a number with too many digits"
            ) from error
        if _escaped_surrogate(text, value):
            raise _Refused("surrogate", "arguments hold half of a surrogate pair")
        if self._equal_duplicates:
            tags = (*tags, "json:duplicate_key")
        return JsonText(value, tags, self._whole_floats)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > MAX_KEYS:
            raise _Refused("too_many_keys", f"an object has {len(pairs)} keys; at most {MAX_KEYS}")
        result = dict(pairs)
        if len(result) < len(pairs):
            self._check_duplicates(pairs)
        return result

    def _check_duplicates(self, pairs: list[tuple[str, Any]]) -> None:
        seen: dict[str, str] = {}
        for key, value in pairs:
            spelled = json.dumps(value, sort_keys=True)
            if key in seen and not (self._repair and seen[key] == spelled):
                raise _Refused("duplicate_key", f"key {quote(key)} is given twice")
            seen[key] = spelled
        self._equal_duplicates = True

    def _float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise _Refused("non_finite", f"number {quote(text)} is too large")
        if value.is_integer():
            self._whole_floats = True
        return value


def _constant(name: str) -> NoReturn:
    raise _Refused("non_finite", f"{name} is not a JSON number")


def _escaped_surrogate(text: str, value: Any) -> bool:
    """Such text cannot be stored as UTF-8; only an escape can bring one in here."""
    if "\\ud" not in text and "\\uD" not in text:
        return False
    return _SURROGATE.search(json.dumps(value, ensure_ascii=False)) is not None
