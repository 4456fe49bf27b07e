"""JSON Schema of a tool's arguments or result, compiled once; errors as one line for the model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn

import jsonschema_rs

from sandbox.calls.shapes import closed, properties_at
from sandbox.calls.types import plain, quote
from sandbox.errors import TaskError

_SHOWN_KEYS = 12
_LOOKED_AT = 32
_LARGE = 4096
"""The library lists every error at once, so of a value with more parts only the first is asked
for: a megabyte of wrong items must not make a million errors."""

OddKeys = Mapping[tuple[tuple[str | int, ...], str], tuple[str, tuple[str, ...]]]
"""(path, key) -> ("ambiguous" | "conflict", properties)."""


class CompiledSchema:
    """A checked JSON Schema (2020-12), evaluated in native code: a megabyte takes milliseconds.

    ``closed``: objects that list properties take no others even where the schema does not say so,
    because a silently ignored argument teaches nothing.
    """

    def __init__(self, schema: dict[str, Any], owner: str = "tool", *, close: bool = True) -> None:
        """TaskError if ``schema`` is not a JSON Schema; ``owner`` names it in the message."""
        self.schema = schema
        self.closed = closed(schema)
        self._closed = _compile(self.closed, owner)
        self._parts: dict[int, jsonschema_rs.Draft202012Validator | None] = {}
        self._validator = self._closed if close else _compile(schema, owner)

    def is_valid(self, value: Any) -> bool:
        """Whether nothing is wrong with ``value``."""
        return self._validator.is_valid(value)

    def part_is_valid(self, value: Any, part: dict[str, Any]) -> bool:
        """Whether ``value`` satisfies ``part``, a schema inside ``closed``.

        A part that cannot stand alone (it refers to its surroundings) never is.
        """
        if id(part) not in self._parts:
            self._parts[id(part)] = self._compiled_part(part)
        validator = self._parts[id(part)]
        return validator is not None and validator.is_valid(value)

    def _compiled_part(self, part: dict[str, Any]) -> jsonschema_rs.Draft202012Validator | None:
        shared = {key: self.closed[key] for key in ("$defs", "definitions") if key in self.closed}
        try:
            return _compile({**part, **shared}, "part")
        except TaskError:
            return None

    def is_closed_valid(self, value: Any) -> bool:
        """Valid, and without a key that no schema lists."""
        return self._closed.is_valid(value)

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value``, or None: key, expected type, nearest known key."""
        return self.problems(value)[0] or None

    def problems(self, value: Any, odd_keys: OddKeys | None = None) -> tuple[str, tuple[str, ...]]:
        """(one line, details as in CallError), or ("", ()) for a valid value."""
        lines: dict[str, list[str]] = {"key": [], "missing": [], "other": []}
        details: dict[str, None] = {}
        for error in self._errors(value):
            for rank, line, detail in self._explain(error, value, odd_keys or {}):
                lines[rank].append(line)
                details[detail] = None
        if not details:
            return "", ()
        first = lines["key"][:1] + lines["missing"][:1] or lines["other"][:1]
        return "; ".join(first), tuple(details)

    def paths_of_errors(self, value: Any) -> list[tuple[str | int, ...]]:
        """Where the first errors are."""
        return [tuple(error.instance_path) for error in self._errors(value)]

    def _errors(self, value: Any) -> list[jsonschema_rs.ValidationError]:
        if not _is_large(value):
            return list(islice(self._validator.iter_errors(value), _LOOKED_AT))
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            return [error]
        return []

    def _explain(
        self, error: jsonschema_rs.ValidationError, value: Any, odd_keys: OddKeys
    ) -> Iterator[tuple[str, str, str]]:
        """(kind of line, line, detail) of every key an error is about."""
        path = list(error.instance_path)
        where = _dotted(path)
        facts = error.kind.as_dict()
        key = f"key {quote(where)}" if where else "arguments"
        shown = _shown(error.instance)
        match error.kind.name:
            case "additionalProperties" | "unevaluatedProperties":
                for extra in facts["unexpected"][:_SHOWN_KEYS]:
                    kind, names = odd_keys.get((tuple(path), extra), ("unknown", ()))
                    detail = f"{kind}:{_dotted([*path, extra])}"
                    yield "key", self._unknown_key(extra, path, kind, names), detail
            case "required":
                missing = str(facts["property"])
                inside = f" in {quote(where)}" if where else ""
                yield (
                    "missing",
                    f"missing key {quote(missing)}{inside}",
                    f"missing:{_dotted([*path, missing])}",
                )
            case "type":
                wanted = " or ".join(facts["types"])
                yield "other", f"{key}: expected {wanted}, got {shown}", f"invalid:{where}"
            case "enum":
                choices = ", ".join(quote(str(choice)) for choice in facts["options"][:_SHOWN_KEYS])
                line = f"{key}: expected one of {choices}, got {shown}"
                yield "other", line, f"invalid:{where}"
            case rule:
                limit = {name: item for name, item in facts.items() if name not in ("context",)}
                said = quote(str(next(iter(limit.values()), "")))
                yield "other", f"{key}: {shown} breaks the rule {rule} = {said}", f"invalid:{where}"

    def _unknown_key(
        self, extra: str, path: list[str | int], kind: str, names: tuple[str, ...]
    ) -> str:
        inside = f" in {quote(_dotted(path))}" if path else ""
        shown = f"{quote(extra)}{inside}"
        if kind == "ambiguous":
            return f"ambiguous key {shown}: could be {', '.join(quote(name) for name in names)}"
        if kind == "conflict":
            return f"key {shown} and key {quote(names[0])} give different values; give one"
        known = sorted(properties_at(self.closed, path))
        near = difflib.get_close_matches(extra[:64], known, n=1, cutoff=0.6)
        hint = (
            f"did you mean {quote(near[0])}?"
            if near
            else f"known keys: {', '.join(known[:_SHOWN_KEYS]) or '(none)'}"
        )
        return f"unknown key {shown}: {hint}"


def _compile(schema: dict[str, Any], owner: str) -> jsonschema_rs.Draft202012Validator:
    try:
        return jsonschema_rs.Draft202012Validator(schema, retriever=_no_retrieval)
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise TaskError(f"{owner}: not a JSON Schema: {reason}") from error


def _no_retrieval(uri: str) -> NoReturn:
    """A schema of a task must not make the host read files or talk to the network."""
    raise ValueError(f"$ref to {uri} is not local; put it under $defs")


def _is_large(value: Any) -> bool:
    """Whether a value has more than _LARGE parts; looks at no more than that."""
    left = _LARGE
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict | list):
            left -= len(inner)
            if left < 0:
                return True
            pending += inner.values() if isinstance(inner, dict) else inner
    return False


def _dotted(path: list[str | int]) -> str:
    return ".".join(plain(str(part)) for part in path)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return plain(str(value)) if value is not None else "null"
