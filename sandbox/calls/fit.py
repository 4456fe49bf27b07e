"""Fit a parsed value to a schema: keys, strings that hold JSON, lossless types, enum spelling.

Only what the schema asks for is touched (facts/sandboxes.md 3.3, 3.4); a value that fits nothing
is left alone, and validation says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox.calls.json_text import MAX_DEPTH, JsonProblem, read_json
from sandbox.calls.keys import KeyMatcher
from sandbox.calls.policy import KeyTier
from sandbox.calls.shapes import Place, Schema, admits, place_of, type_name, types_of
from sandbox.calls.types import plain
from sandbox.calls.words import folded

MAX_TAGS = 32
"""Of one call; what happens more often, or at more places, ends in one tag ``more``."""
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,299})\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,299})(?:\.[0-9]{1,299})?(?:[eE][+-]?[0-9]{1,3})?\Z")
_BOOLEANS = {"true": True, "false": False, "True": True, "False": False}
_EXACT = 2**53
_TAG_OF_TIER = {
    KeyTier.STYLE: "key_style",
    KeyTier.ALIAS: "key_alias",
    KeyTier.FUZZY: "key_fuzzy",
}

Path = tuple[str | int, ...]
PartIsValid = Callable[[Any, Schema], bool]


@dataclass(slots=True)
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
    is_valid: PartIsValid | None = None,
) -> Fitted:
    """``value`` as ``schema`` wants it, as far as that is certain; the input may be changed.

    Keys are matched only in objects that take no others (``additionalProperties`` false).
    ``is_valid`` (value, part of the schema) lets parts that are right already be skipped.
    """
    fitted = Fitted(value)
    fitter = _Fitter(fitted, schema, KeyMatcher(tier, aliases, words), is_valid)
    fitted.value = fitter.fit(value, schema, (), "")
    return fitted


class _Fitter:
    """``path``: of a value, with indices; ``where``: the same as tags show it, without them."""

    def __init__(
        self, fitted: Fitted, root: Schema, matcher: KeyMatcher, is_valid: PartIsValid | None
    ) -> None:
        self._fitted = fitted
        self._root = root
        self._matcher = matcher
        self._is_valid = is_valid
        self._places: dict[int, Place] = {}
        self._wheres: dict[tuple[str, str], str] = {}

    def fit(self, value: Any, schema: Any, path: Path, where: str) -> Any:
        if len(path) > MAX_DEPTH:
            return value
        place = self._place(schema)
        if place.branches:
            branch = _branch_for(value, place.branches)
            return value if branch is None else self.fit(value, branch, path, where)
        if not admits(place.types, value):
            converted, tag = _convert(value, place.types)
            if tag is None:
                return self._spelled(value, place, where)
            self._note(tag, where)
            return self.fit(converted, schema, path, where)
        if isinstance(value, dict):
            return self._fit_object(value, place, path, where)
        if isinstance(value, list):
            return self._fit_array(value, place, path, where)
        if _is_whole(value) and place.types and "number" not in place.types:
            self._note("coerce", where)
            return int(value)
        return self._spelled(value, place, where)

    def _fit_object(
        self, value: dict[str, Any], place: Place, path: Path, where: str
    ) -> dict[str, Any]:
        if place.is_closed:
            self._match_keys(value, place.names, path, where)
        for key, item in value.items():
            inner = place.properties.get(key, place.others)
            if isinstance(inner, dict) and not self._is_right(item, inner):
                value[key] = self.fit(item, inner, (*path, key), self._inside(where, key))
        return value

    def _match_keys(
        self, value: dict[str, Any], properties: tuple[str, ...], path: Path, where: str
    ) -> None:
        match = self._matcher.match(value, properties)
        if match is None:
            return
        for key, (name, tier) in match.renamed.items():
            tag = f"{_TAG_OF_TIER[tier]}:{self._inside(where, key)}->{name}"
            original = value.pop(key)
            value[name] = original
            self._fitted.renames.append(Rename(value, path, key, name, original, tag))
            self._fitted.tags[tag] = None
        for key, (name, _) in match.dropped.items():
            del value[key]
            self._fitted.tags[f"key_duplicate:{self._inside(where, key)}->{name}"] = None
        for key, names in match.ambiguous.items():
            self._fitted.odd_keys[path, key] = ("ambiguous", names)
        for key, name in match.conflict.items():
            self._fitted.odd_keys[path, key] = ("conflict", (name,))

    def _fit_array(self, value: list[Any], place: Place, path: Path, where: str) -> list[Any]:
        if not place.items and not place.first:
            return value
        items = self._place(place.items)
        if not place.first and items.is_plain:
            return self._fit_scalars(value, items.types, f"{where}[]")
        for index, item in enumerate(value):
            inner = place.first[index] if index < len(place.first) else place.items
            if isinstance(inner, dict) and inner and not self._is_right(item, inner):
                value[index] = self.fit(item, inner, (*path, index), f"{where}[]")
        return value

    def _fit_scalars(self, value: list[Any], types: frozenset[str], where: str) -> list[Any]:
        """Items of which only a scalar type is asked: a loop without detours, lists may be long."""
        tags = set()
        for index, item in enumerate(value):
            if not admits(types, item):
                value[index], tag = _convert(item, types)
                tags.add(tag)
            elif "number" not in types and _is_whole(item):
                value[index] = int(item)
                tags.add("coerce")
        for tag in sorted(tags - {None}):
            self._note(tag, where)
        return value

    def _spelled(self, value: Any, place: Place, where: str) -> Any:
        """An enum's own spelling of ``value``, where exactly one choice is meant."""
        choices = place.choices
        if choices is None or not isinstance(value, str) or value in choices:
            return value
        form = folded(value)
        meant = [choice for choice in choices if isinstance(choice, str) and folded(choice) == form]
        if len(meant) != 1:
            return value
        self._note("enum", where)
        return meant[0]

    def _is_right(self, value: Any, schema: Schema) -> bool:
        """Whether a value needs no look inside."""
        if isinstance(value, dict | list):
            return self._is_valid is not None and self._is_valid(value, schema)
        place = self._place(schema)
        return place.is_plain and type_name(value) in place.types

    def _place(self, schema: Any) -> Place:
        place = self._places.get(id(schema))
        if place is None:
            place = self._places[id(schema)] = place_of(schema, self._root)
        return place

    def _inside(self, where: str, key: str) -> str:
        inside = self._wheres.get((where, key))
        if inside is None:
            inside = self._wheres[where, key] = f"{where}.{plain(key)}" if where else plain(key)
        return inside

    def _note(self, tag: str, where: str) -> None:
        if len(self._fitted.tags) <= MAX_TAGS:
            self._fitted.tags[f"{tag}:{where}"] = None


def _branch_for(value: Any, branches: tuple[Schema, ...]) -> Schema | None:
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


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and abs(value) < _EXACT and value.is_integer()
