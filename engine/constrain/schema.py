"""JSON schemas before they become a grammar: nothing unknown, nothing that a reader would choke on.

Every keyword is either understood by llguidance, or says nothing about values, or is refused by
name. The grammar may accept less than the schema (never more): numbers stay within 1e15 where the
schema names no bound, since 1e999 is valid JSON that no reader takes; and with ``closed`` an object
that lists its properties gets no others, as people mean it in a tool's parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ConstraintError

_VALUE = ("additionalProperties", "items", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PLAIN = frozenset(
    [
        "type",
        "enum",
        "const",
        "required",
        "minProperties",
        "maxProperties",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "$ref",
    ]
)
_SILENT = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "id",
        "$comment",
        "discriminator",
        "strict",
    ]
)
"""Say nothing about values."""
_COMBINE = ("anyOf", "oneOf", "allOf", "$ref")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LIMIT = 10**15
_ANY = "parl-any-value"
_TO_ANY = {"$ref": f"#/$defs/{_ANY}"}
_FORMATS = {"email": r"a@b\.co", "idn-email": r"a@b\.co", "uri": "a:b", "hostname": "a"}

MAX_DEPTH = 64


def parse_schema(text: str, where: str = "json_schema") -> Any:
    """The schema in ``text``; ConstraintError when it is none."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ConstraintError(f"{where}: not JSON ({error}); expected a JSON schema") from error
    if not isinstance(schema, dict | bool):
        raise ConstraintError(
            f"{where}: {str(schema)[:40]!r} is a {type(schema).__name__}; expected a JSON schema, "
            "an object or a boolean"
        )
    return schema


def prepared(schema: Any, where: str = "json_schema", closed: bool = False) -> dict[str, Any]:
    """``schema`` as the grammar needs it; ConstraintError names a keyword that is not supported,
    and its place."""
    composes = _composes(schema)
    closed = closed and not composes
    ready = _prepared(schema, where, closed, 0)
    if ready is False:
        raise ConstraintError(f"{where}: the schema is false, which no value meets")
    bounds = {"minimum": -_LIMIT, "maximum": _LIMIT}
    anything: list[Any] = [{"type": ["null", "boolean", "string"]}, {"type": "number", **bounds}]
    if not composes:  # the library cannot intersect two schemas that refer to themselves
        anything.append({"type": "array", "items": _TO_ANY})
        anything.append({"type": "object", "additionalProperties": _TO_ANY})
    if _ANY in json.dumps(ready):
        ready["$defs"] = {**ready.get("$defs", {}), _ANY: {"anyOf": anything}}
    return ready


def patterns(schema: Any) -> list[str]:
    """Every pattern in a prepared schema, and one for a format that is hard to find."""
    found: list[str] = []
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                found.append(value)
            elif key == "format" and value in _FORMATS:
                found.append(_FORMATS[value])
            elif key == "patternProperties":
                found += value
            found += patterns(value)
    elif isinstance(schema, list):
        found += [pattern for entry in schema for pattern in patterns(entry)]
    return list(dict.fromkeys(found))


def _composes(schema: Any) -> bool:
    """Whether schemas are combined, so that one does not list all properties of a value."""
    if isinstance(schema, list):
        return any(map(_composes, schema))
    if not isinstance(schema, Mapping):
        return False
    combined = [key for key in _COMBINE if key in schema]
    others = set(schema) - _SILENT - {"$defs", "definitions", "type", *combined}
    if "allOf" in schema or (combined and (len(combined) > 1 or others)):
        return True
    return any(_composes(value) for value in schema.values())


def _prepared(schema: Any, where: str, closed: bool, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConstraintError(f"{where}: nested more than {MAX_DEPTH} deep; flatten it with $defs")
    if schema is True or schema == {}:
        return dict(_TO_ANY)
    if schema is False:
        return False
    if not isinstance(schema, Mapping):
        raise ConstraintError(
            f"{where}: {str(schema)[:40]!r} is no schema; expected an object or a boolean"
        )
    ready: dict[str, Any] = {}
    for key, value in schema.items():
        here = f"{where}.{key}"
        if key in _PLAIN:
            ready[key] = value
        elif key in _VALUE:
            is_list = key == "items" and isinstance(value, list)
            ready[key] = (
                [_prepared(v, f"{here}[{i}]", closed, depth + 1) for i, v in enumerate(value)]
                if is_list
                else _prepared(value, here, closed, depth + 1)
            )
        elif key in _LISTS:
            entries = _as(list, value, here)
            ready[key] = [
                _prepared(v, f"{here}[{i}]", closed, depth + 1) for i, v in enumerate(entries)
            ]
        elif key in _MAPS:
            entries = _as(Mapping, value, here)
            ready[key] = {
                name: _prepared(v, f"{here}.{name}", closed, depth + 1)
                for name, v in entries.items()
            }
        elif key not in _SILENT and not key.startswith("x-"):
            raise ConstraintError(
                f"{where}: keyword {key!r} is not supported by constrained decoding; remove it or "
                "check it afterwards"
            )
    return _bounded(ready, closed)


def _as(kind: type, value: Any, here: str) -> Any:
    if not isinstance(value, kind):
        raise ConstraintError(f"{here}: {str(value)[:40]!r}, expected a {kind.__name__.lower()}")
    return value


def _bounded(ready: dict[str, Any], closed: bool) -> dict[str, Any]:
    """What ``ready`` leaves open, filled with the narrowed ones."""
    if any(key in ready for key in (*_COMBINE, "enum", "const")):
        return ready
    kinds = ready.get("type", ["number", "object", "array"])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "number" in kinds and "multipleOf" not in ready:
        low = [ready[k] for k in _BOUNDS[:2] if k in ready]
        high = [ready[k] for k in _BOUNDS[2:] if k in ready]
        if not low and (not high or min(high) > -_LIMIT):
            ready["minimum"] = -_LIMIT
        if not high and (not low or max(low) < _LIMIT):
            ready["maximum"] = _LIMIT
    if "array" in kinds and "items" not in ready:
        ready["items"] = dict(_TO_ANY)
    if "object" in kinds and "additionalProperties" not in ready:
        listed = ready.get("properties")
        is_closed = closed and listed is not None and set(ready.get("required", ())) <= set(listed)
        ready["additionalProperties"] = False if is_closed else dict(_TO_ANY)
    return ready
