"""Does the instruction or a tool's description print what the agent is to find out?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sandbox.check.findings import Step
from sandbox.check.reads import decoded_calls
from sandbox.check.subject import Case
from sandbox.check.written import Written

MIN_CHARS = 3
"""Shorter answers (a digit, a yes) stand in many texts by chance."""
_FEW = frozenset({"yes", "true", "false", "none", "null"})
_OPTION = re.compile(r"(?i)(?:\b(?:or|either|nor)\b|[/|,;、，；或]|还是)\W*$")
_OPTION_AFTER = re.compile(r"(?i)^\W*?(?:\bor\b|[/|]|、|或|还是|,\s*\w+\s*(?:,|\bor\b))")
_EXAMPLE = re.compile(r"(?i)(?:\be\.?\s?g\b|\bfor example\b|\bfor instance\b|\bsuch as\b|\blike\b"
                      r"|比如|例如|如)\W*$")  # fmt: skip
_DAY = re.compile(r"\d{4}-\d\d(-\d\d)?\S*|\d\d?:\d\d\S*")


def answer_in_text(case: Case, written: Written, step: Step) -> None:
    """Warnings; answers of four characters and more in the instruction are the rule
    answer-in-instruction."""
    instruction, answer = case.spec.instruction, case.oracle.final_text.strip()
    whole = len(answer) == MIN_CHARS and answer.casefold() not in _FEW
    if whole and any(not _offered(instruction, found) for found in _found(instruction, answer)):
        _say(step, "instruction.md", f"the answer {answer!r}")
    numbers = re.findall(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?![\w-])", answer)
    if len(numbers) == 1 and numbers[0] != answer and len(numbers[0]) >= MIN_CHARS:
        shown = _found(instruction, numbers[0])
        if any(_EXAMPLE.search(instruction[: found.start()]) for found in shown):
            _say(step, "instruction.md", f"{numbers[0]!r}, the number of the answer")
    for tool in case.spec.tools:
        text = "\n".join([tool.description, *_descriptions(tool.schema)])
        if whole and any(not _offered(text, found) for found in _found(text, answer)):
            _say(step, f"tool {tool.name}", f"the answer {answer!r}")
        _ids(case, written, tool.name, text, step)


def _ids(case: Case, written: Written, name: str, text: str, step: Step) -> None:
    """Names that the solution passes to a change: those that nothing else tells, or just all of
    the right ones out of more."""
    effects = {tool.name: tool.effect for tool in case.spec.tools}
    given: dict[tuple[str, str], list[str]] = {}
    for tool, arguments in decoded_calls(case):
        for key, value in arguments.items():
            if effects.get(tool, "read") != "read" and isinstance(value, str) and _is_id(value):
                given.setdefault((tool, key), []).append(value)
    known = "\n".join([case.spec.instruction, *written.texts])
    for (tool, key), values in given.items():
        told = [value for value in dict.fromkeys(values) if _found(text, value)]
        alone = [value for value in told if not _found(known, value)]
        shape = {_shape(value) for value in values}
        alike = {word for word in re.findall(r"[\w][\w.:/-]*\w", known) if _shape(word) in shape}
        others = [word for word in alike - set(values) if not _found(text, word)]
        every = len(told) > 1 and set(told) == set(values) and bool(others)
        if alone or every:
            shown = ", ".join(map(repr, (alone or told)[:4]))
            _say(step, f"tool {name}", f"{shown}, which the solution passes as {tool}.{key}")


def _say(step: Step, where: str, what: str) -> None:
    step.add("answer-in-text", where, f"says {what}; take another example", "warning")


def _is_id(value: str) -> bool:
    return (
        MIN_CHARS <= len(value) <= 60
        and re.search(r"\d", value) is not None
        and not re.search(r"\s", value)
        and not _DAY.fullmatch(value)
    )


def _shape(word: str) -> str:
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", word))


def _found(text: str, value: str) -> list[re.Match[str]]:
    pattern = rf"(?<![\w.,-]){re.escape(value)}(?![\w-]|[.,]\d)"
    return list(re.finditer(pattern, text)) if value else []


def _offered(text: str, found: re.Match[str]) -> bool:
    """One of several that the text lets the agent choose from."""
    before, after = text[: found.start()], text[found.end() :]
    line = before.rsplit("\n", 1)[-1]
    return bool(
        (_OPTION.search(before) and not _EXAMPLE.search(before.rstrip(", ")))
        or _OPTION_AFTER.match(after)
        or re.fullmatch(r"\s*(?:[-*\u2022]|\w[.)])\s*", line)
    )


def _descriptions(schema: Any) -> Iterator[str]:
    """Texts for the reader in a JSON schema; an enum is offered and says nothing."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _descriptions(inner)
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            if key in ("description", "title", "examples", "default"):
                yield from (str(part) for part in (inner if isinstance(inner, list) else [inner]))
            elif key not in ("enum", "const"):
                yield from _descriptions(inner)
