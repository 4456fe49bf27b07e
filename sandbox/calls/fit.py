"""Fit a parsed value to a schema: keys, strings that hold JSON, lossless types, enum spelling.

Only what the schema asks for is touched (facts/sandboxes.md 3.3, 3.4); a value that fits nothing
is left alone, and validation says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox.calls.json_text import MAX_DEPTH, JsonProblem, read_json
from sandbox.calls.keys import KeyMatcher
from sandbox.calls.policy import KeyTier
from sandbox.calls.shapes import (
    Schema,
    admits,
    branches_of,
    choices_of,
    resolve,
    type_name,
    types_of,
)
from sandbox.calls.types import plain
from sandbox.calls.words import folded

MAX_TAGS = 32
"""Of one call; what happens more often, or at more places, ends in one tag ``more``."""
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,299})\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,299})(?:\.[0-9]{1,299})?(?:[eE][+-]?[0-9]{1,3})?\Z")
_BOOLEANS = {"true": True, "false": False, "True": True, "False": False}
_SCALARS = frozenset(("string", "integer", "number", "boolean", "null"))
_EXACT = 2**53
_TAG_OF_TIER = {
    KeyTier.STYLE: "key_style",
    KeyTier.ALIAS: "key_alias",
    KeyTier.FUZZY: "key_fuzzy",
}

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Rename:
    """A key that was taken for a property, with what it takes to undo that."""

    holder: dict[str, Any]
    path: Path
    given: str
    name: str
    original: Any
    tag: str

    def undo(self) -> None:
        """Give the key its name and value back."""
        del self.holder[self.name]
        self.holder[self.given] = self.original


@dataclass(slots=True)
class Fitted:
    """``value`` fitted; ``odd_keys``: (path, key) -> ("ambiguous", candidates) or ("conflict",
    (property,))."""

    value: Any
    tags: dict[str, None] = field(default_factory=dict)
    renames: list[Rename] = field(default_factory=list)
    odd_keys: dict[tuple[Path, str], tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def repairs(self) -> tuple[str, ...]:
        tags = tuple(self.tags)
        return tags if len(tags) <= MAX_TAGS else (*tags[:MAX_TAGS], "more")


def fit(
    value: Any,
    schema: Schema,
    tier: KeyTier,
    aliases: Mapping[str, Iterable[str]] | None = None,
    words: frozenset[str] = frozenset(),
) -> Fitted:
    """``value`` as ``schema`` wants it, as far as that is certain; the input may be changed.

    Keys are matched only in objects that take no others (``additionalProperties`` false).
    """
    fitted = Fitted(value)
    fitted.value = _Fitter(fitted, schema, KeyMatcher(tier, aliases, words)).fit(value, schema, ())
    return fitted


class _Fitter:
    def __init__(self, fitted: Fitted, root: Schema, matcher: KeyMatcher) -> None:
        self._fitted = fitted
        self._root = root
        self._matcher = matcher

    def fit(self, value: Any, schema: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            return value
        schema = resolve(schema, self._root)
        branches = branches_of(schema, self._root)
        if branches and "properties" not in schema:
            branch = _branch_for(value, branches)
            return value if branch is None else self.fit(value, branch, path)
        types = types_of(schema)
        if not admits(types, value):
            converted, tag = _convert(value, types)
            if tag is None:
                return self._spelled(value, schema, path)
            self._note(tag, path)
            return self.fit(converted, schema, path)
        if isinstance(value, dict):
            return self._fit_object(value, schema, path)
        if isinstance(value, list):
            return self._fit_array(value, schema, path)
        if isinstance(value, float) and _is_whole(value) and "number" not in types and types:
            self._note("coerce", path)
            return int(value)
        return self._spelled(value, schema, path)

    def _fit_object(self, value: dict[str, Any], schema: Schema, path: Path) -> dict[str, Any]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        others = schema.get("additionalProperties")
        if properties and others is False and "patternProperties" not in schema:
            self._match_keys(value, tuple(properties), path)
        for key, item in value.items():
            inner = properties.get(key, others)
            if isinstance(inner, dict):
                value[key] = self.fit(item, inner, (*path, key))
        return value

    def _match_keys(self, value: dict[str, Any], properties: tuple[str, ...], path: Path) -> None:
        match = self._matcher.match(value, properties)
        for key, (name, tier) in match.renamed.items():
            tag = f"{_TAG_OF_TIER[tier]}:{_shown((*path, key))}->{name}"
            original = value.pop(key)
            value[name] = original
            self._fitted.renames.append(Rename(value, path, key, name, original, tag))
            self._fitted.tags[tag] = None
        for key, (name, _) in match.dropped.items():
            del value[key]
            self._fitted.tags[f"key_duplicate:{_shown((*path, key))}->{name}"] = None
        for key, names in match.ambiguous.items():
            self._fitted.odd_keys[path, key] = ("ambiguous", names)
        for key, name in match.conflict.items():
            self._fitted.odd_keys[path, key] = ("conflict", (name,))

    def _fit_array(self, value: list[Any], schema: Schema, path: Path) -> list[Any]:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        items = resolve(schema.get("items"), self._root)
        if not items and not first:
            return value
        if not first and _is_plain(items):
            return self._fit_scalars(value, types_of(items), path)
        for index, item in enumerate(value):
            inner = first[index] if index < len(first) else items
            if isinstance(inner, dict) and inner:
                value[index] = self.fit(item, inner, (*path, index))
        return value

    def _fit_scalars(self, value: list[Any], types: frozenset[str], path: Path) -> list[Any]:
        """Items of which only a scalar type is asked: a loop without detours, lists may be long."""
        tags = set()
        for index, item in enumerate(value):
            if not admits(types, item):
                value[index], tag = _convert(item, types)
                tags.add(tag)
            elif isinstance(item, float) and "number" not in types and _is_whole(item):
                value[index] = int(item)
                tags.add("coerce")
        for tag in sorted(tags - {None}):
            self._note(tag, (*path, 0))
        return value

    def _spelled(self, value: Any, schema: Schema, path: Path) -> Any:
        """An enum's own spelling of ``value``, where exactly one choice is meant."""
        choices = choices_of(schema)
        if choices is None or not isinstance(value, str) or value in choices:
            return value
        form = folded(value)
        meant = [choice for choice in choices if isinstance(choice, str) and folded(choice) == form]
        if len(meant) != 1:
            return value
        self._note("enum", path)
        return meant[0]

    def _note(self, tag: str, path: Path) -> None:
        if len(self._fitted.tags) <= MAX_TAGS:
            self._fitted.tags[f"{tag}:{_shown(path)}"] = None


def _branch_for(value: Any, branches: list[Schema]) -> Schema | None:
    """The one branch that can be meant; None where that is not certain."""
    fitting = [branch for branch in branches if admits(types_of(branch), value)]
    if not fitting:
        fitting = [b for b in branches if _convert(value, types_of(b))[1] is not None]
    return fitting[0] if len(fitting) == 1 else None


def _convert(value: Any, types: frozenset[str]) -> tuple[Any, str | None]:
    """(converted, tag) or (value, None); lossless, and only to what the schema asks for."""
    if not isinstance(value, str) or "string" in types:
        return value, None
    if types & {"array", "object"} and value.lstrip()[:1] in ("[", "{"):
        read = read_json(value, repair=False)
        if not isinstance(read, JsonProblem) and type_name(read.value) in types:
            return read.value, "nested_json"
    if "integer" in types and _INTEGER.match(value):
        return int(value), "coerce"
    if "number" in types and _NUMBER.match(value) and _is_finite(value):
        return (int(value) if _INTEGER.match(value) else float(value)), "coerce"
    if "boolean" in types and value in _BOOLEANS:
        return _BOOLEANS[value], "coerce"
    if "null" in types and value == "null":
        return None, "coerce"
    return value, None


def _is_finite(text: str) -> bool:
    return abs(float(text)) < float("inf")


def _is_whole(value: float) -> bool:
    return abs(value) < _EXACT and value.is_integer()


def _is_plain(items: Schema) -> bool:
    """Whether the schema asks for a scalar type and, as far as fitting goes, for nothing else."""
    types = types_of(items)
    return bool(types) and types <= _SCALARS and choices_of(items) is None and "anyOf" not in items


def _shown(path: Path) -> str:
    """``items[].city``: list indices are left out, so that one habit is one tag."""
    text = ""
    for part in path:
        text += "[]" if isinstance(part, int) else ("." if text else "") + plain(part)
    return text
