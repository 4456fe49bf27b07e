"""What a JSON Schema says about one place: references, types, properties, items, branches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_BRANCHES = ("anyOf", "oneOf")
_COMPOSING = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref", "not")
_OPENING = (
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("properties", "propertyNames", "$ref", "allOf", "anyOf", "oneOf", "$dynamicRef"),
)
_MAX_HOPS = 16
_SCALARS = frozenset(("string", "integer", "number", "boolean", "null"))


@dataclass(frozen=True, slots=True)
class Place:
    """Everything that fitting asks of one place of a schema, read once."""

    types: frozenset[str]
    branches: tuple[Schema, ...]
    choices: list[Any] | None
    properties: Schema
    names: tuple[str, ...]
    others: Any
    """Schema of keys that are no properties."""
    is_closed: bool
    """Takes no other keys than its properties."""
    first: tuple[Any, ...]
    items: Schema
    is_plain: bool
    """Asks for a scalar type and, as far as fitting goes, for nothing else."""


def place_of(schema: Any, root: Schema) -> Place:
    """The place that ``schema`` describes, references followed."""
    schema = resolve(schema, root)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties")
    first = schema.get("prefixItems")
    types, choices = types_of(schema), choices_of(schema)
    branches = () if properties else tuple(branches_of(schema, root))
    return Place(
        types=types,
        branches=branches,
        choices=choices,
        properties=properties,
        names=tuple(properties),
        others=others,
        is_closed=bool(properties) and others is False and "patternProperties" not in schema,
        first=tuple(first) if isinstance(first, list) else (),
        items=resolve(schema.get("items"), root),
        is_plain=bool(types) and types <= _SCALARS and choices is None and not branches,
    )


def resolve(schema: Any, root: Schema) -> Schema:
    """``schema`` with local references followed; {} where nothing is known about the place."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at_pointer(root, reference)
    return {}


def types_of(schema: Schema) -> frozenset[str]:
    """Types a place admits; empty = it does not say."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(str(name) for name in named)
    choices = choices_of(schema)
    return frozenset(type_name(choice) for choice in choices or ())


def choices_of(schema: Schema) -> list[Any] | None:
    """Values of ``enum`` or ``const``."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) else None


def branches_of(schema: Schema, root: Schema) -> list[Schema]:
    """Alternatives of a simple anyOf or oneOf, references followed."""
    for key in _BRANCHES:
        branches = schema.get(key)
        if isinstance(branches, list):
            return [resolve(branch, root) for branch in branches]
    return []


def admits(types: frozenset[str], value: Any) -> bool:
    """Whether a value is of one of the types; {} admits everything."""
    if not types:
        return True
    name = type_name(value)
    return (
        name in types
        or (name == "number" and "integer" in types and value.is_integer())
        or (name == "integer" and "number" in types)
    )


def type_name(value: Any) -> str:
    """JSON Schema's name of a JSON value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def properties_at(root: Schema, path: list[str | int]) -> tuple[str, ...]:
    """Known keys of the object at ``path`` of a value, as far as the schema is simple."""
    place = resolve(root, root)
    for part in path:
        options = [place, *branches_of(place, root)]
        place = next((found for at in options if (found := _step(at, part, root))), {})
    options = [place, *branches_of(place, root)]
    return tuple(name for at in options for name in at.get("properties") or {})


def _step(place: Schema, part: str | int, root: Schema) -> Schema:
    if isinstance(part, int):
        first = place.get("prefixItems")
        if isinstance(first, list) and part < len(first):
            return resolve(first[part], root)
        return resolve(place.get("items"), root)
    properties = place.get("properties")
    if isinstance(properties, dict) and part in properties:
        return resolve(properties[part], root)
    return resolve(place.get("additionalProperties"), root)


def closed(schema: Schema) -> Schema:
    """A copy in which objects that list their properties and say nothing of others take no others.

    Objects composed of several schemas stay as they are: what another part allows is not known.
    """
    composed = _mentions(schema, "allOf")
    return _close(schema, close_definitions=not composed)


def _close(schema: Any, *, close_definitions: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            deeper = key == "properties" or close_definitions
            result[key] = {
                name: _close(inner, close_definitions=close_definitions) if deeper else inner
                for name, inner in value.items()
            }
        elif key in ("items", "additionalProperties"):
            result[key] = _close(value, close_definitions=close_definitions)
        elif key in (*_BRANCHES, "prefixItems") and isinstance(value, list):
            result[key] = [_close(inner, close_definitions=close_definitions) for inner in value]
        else:
            result[key] = value
    if isinstance(schema.get("properties"), dict) and not _is_open(schema):
        result["additionalProperties"] = False
    return result


def _is_open(schema: Schema) -> bool:
    if any(key in schema for key in _OPENING if key not in ("properties", *_BRANCHES, "allOf")):
        return True
    return any(_adds(part) for part in _parts(schema))


def _parts(schema: Schema) -> Iterator[Any]:
    for key in _COMPOSING:
        part = schema.get(key)
        if isinstance(part, list):
            yield from part
        elif isinstance(part, dict) and key == "dependentSchemas":
            yield from part.values()
        elif part is not None:
            yield part


def _adds(part: Any) -> bool:
    return isinstance(part, dict) and any(key in part for key in _OPENING)


def _mentions(schema: Any, key: str) -> bool:
    if isinstance(schema, dict):
        return key in schema or any(_mentions(value, key) for value in schema.values())
    return isinstance(schema, list) and any(_mentions(value, key) for value in schema)


def _at_pointer(root: Schema, reference: str) -> Any:
    if not reference.startswith("#"):
        return None
    place: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(part)
        elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        else:
            return None
    return place
