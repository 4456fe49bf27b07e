"""Tool declarations as TypeScript, the form Kimi K2.5 is trained on (facts/kimi-facts.md 1.4).

A tool is ``type NAME = (_: PARAMETERS) => any;`` under its description. Keys are sorted, required
ones first; descriptions, limits and defaults are comments. Values print as Python prints them
(``True``, ``None``), because that is what the model has seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.chat.base import ToolDeclaration
from engine.errors import ChatError

INDENT = "  "
_ROOT = "parameters"
"""Name of a tool's own parameters where its schema refers to itself ("#")."""
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_VALUES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class UntypedSchemaError(ChatError):
    """A JSON Schema that has no TypeScript form here; the tools can still be declared as JSON."""


@dataclass(slots=True)
class _References:
    """What the schemas of one tool refer to, filled while they are read."""

    definitions: dict[str, Any] = field(default_factory=dict)
    to_root: bool = False

    def name(self, reference: Any) -> str:
        if reference == "#":
            self.to_root = True
            return _ROOT
        name = str(reference).rpartition("/")[2]
        if not str(reference).startswith("#/$defs/") or name not in self.definitions:
            raise UntypedSchemaError(f"$ref {reference!r} is neither # nor in the schema's $defs")
        return name


@dataclass(frozen=True, slots=True)
class _Type:
    """One schema, read: the text of its type needs only the indent of where it stands."""

    kind: str
    comments: tuple[str, ...] = ()
    parts: tuple[_Type, ...] = ()
    """Of anyOf, array (the item), object (the type of further keys, if any)."""
    fields: tuple[_Field, ...] = ()
    literal: str = ""

    def text(self, indent: str = "") -> str:
        if self.kind == "any_of":
            return " | ".join(part.text(indent) for part in self.parts)
        if self.kind == "array":
            return self._array(indent)
        if self.kind == "object":
            return self._object(indent)
        return self.literal

    def _array(self, indent: str) -> str:
        item, inner = self.parts[0], indent + INDENT
        if not item.comments:
            return f"Array<{item.text(indent)}>"
        return f"Array<\n{_comment(item.comments, inner)}{inner}{item.text(inner)}\n{indent}>"

    def _object(self, indent: str) -> str:
        inner = indent + INDENT
        ordered = sorted(self.fields, key=lambda one: (one.optional, one.name))
        lines = [one.text(inner) for one in ordered]
        lines += [f"{inner}[k: string]: {further.text(inner)}" for further in self.parts]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: _Type
    optional: bool
    default: Any = None

    def text(self, indent: str) -> str:
        comments = _comment(self.type.comments, indent)
        if self.default is not None:
            plain = isinstance(self.default, int | float)
            shown = repr(self.default) if plain else json.dumps(self.default, ensure_ascii=False)
            comments += f"{indent}// Default: {shown}\n"
        return f"{comments}{indent}{self.name}{'?' * self.optional}: {self.type.text(indent)}"


def declare_in_typescript(tools: Sequence[ToolDeclaration]) -> str:
    """The whole text of a declaration message; UntypedSchemaError names the tool and why."""
    declared: list[str] = []
    for tool in tools:
        try:
            declared.append(_declare(tool))
        except UntypedSchemaError as error:
            raise UntypedSchemaError(f"tool {tool.name}: {error}") from error
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(declared) + "\n}\n"


def _declare(tool: ToolDeclaration) -> str:
    references = _References()
    root = _read_object(_sorted(tool.parameters), references)
    interfaces: list[str] = []
    shown = root.text()
    if references.to_root:
        fields = ",\n".join(one.text(INDENT) for one in root.fields)
        interfaces.append(
            f"interface {_ROOT} {{\n{fields}\n}}" if fields else f"interface {_ROOT} {{}}"
        )
        shown = _ROOT
    for name, schema in list(references.definitions.items()):
        if not isinstance(schema, Mapping):
            # the released encoder stops here, so the model has never seen such an interface
            raise UntypedSchemaError(f"$defs/{name} is {schema!r}, expected an object")
        text, about = _read(schema, references).text(), schema.get("description", "")
        comment = _comment(tuple(about.split("\n")), "") if about else ""
        interfaces.append(f"{comment}interface {name} {text}")
    about = [_comment(tuple(tool.description.split("\n")), "")[:-1]] if tool.description else []
    return "\n".join([*interfaces, *about, f"type {tool.name} = (_: {shown}) => any;"])


def _read(schema: Any, references: _References) -> _Type:
    if isinstance(schema, bool):
        return _Type("scalar", literal="any" if schema else "null")
    if not isinstance(schema, Mapping):
        raise UntypedSchemaError(f"schema {schema!r} is no JSON object")
    if "$ref" in schema:
        return _Type("scalar", _about(schema), literal=references.name(schema["$ref"]))
    if "anyOf" in schema:
        parts = tuple(_read(part, references) for part in _list(schema, "anyOf"))
        return _Type("any_of", _about(schema), parts)
    if "enum" in schema:
        return _Type("scalar", _about(schema), literal=_enum(schema))
    if not schema:
        return _Type("scalar", literal="any")
    if "type" not in schema:
        raise UntypedSchemaError(f"schema with only {', '.join(schema)} has no type")
    kind = schema["type"]
    if isinstance(kind, list):
        unknown = [one for one in kind if one not in _UNION]
        if unknown:
            raise UntypedSchemaError(f"type {unknown[0]!r} is none of {', '.join(_UNION)}")
        return _Type("scalar", _about(schema), literal=" | ".join(_UNION[one] for one in kind))
    if kind == "object":
        return _read_object(schema, references)
    if kind == "array":
        item = _read(schema["items"], references) if schema.get("items") else _ANY
        return _Type("array", _about(schema, "array"), (item,))
    return _Type("scalar", _about(schema, kind), literal="number" if kind == "integer" else kind)


_ANY = _Type("scalar", literal="any")


def _read_object(schema: Mapping[str, Any], references: _References) -> _Type:
    references.definitions.update(schema.get("$defs") or {})
    further: tuple[_Type, ...] = ()
    additional = schema.get("additionalProperties")
    if isinstance(additional, bool):
        further = (_Type("scalar", literal="any" if additional else "never"),)
    elif additional is not None:
        further = (_read(additional, references),)
    required = _list(schema, "required")
    fields = tuple(
        _Field(
            name,
            _read(one, references),
            name not in required,
            one.get("default") if isinstance(one, Mapping) else None,
        )
        for name, one in (schema.get("properties") or {}).items()
    )
    return _Type("object", _about(schema), further, fields)


def _enum(schema: Mapping[str, Any]) -> str:
    values = _list(schema, "enum")
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else (kinds or [])
    if len(kinds) > 2 or (len(kinds) == 2 and "null" not in kinds):
        raise UntypedSchemaError(f"enum of the types {kinds} is more than one type and null")
    named = [one for one in kinds if one != "null"] or kinds
    expected = _ENUM_VALUES.get(named[0]) if named else None
    for value in values:
        if value is not None and expected is not None and not isinstance(value, expected):
            raise UntypedSchemaError(f"enum value {value!r} is no {named[0]}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _about(schema: Mapping[str, Any], kind: Any = "") -> tuple[str, ...]:
    """Comment lines: the description, then the limits that are shown for this kind."""
    about = schema.get("description") or ""
    lines = about.split("\n") if about else []
    limits = [f"{k}: {schema[k]}" for k in _LIMITS.get(str(kind), ()) if k in schema]
    return (*lines, ", ".join(limits)) if limits else tuple(lines)


def _comment(lines: Sequence[str], indent: str) -> str:
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in lines)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key, [])
    if not isinstance(value, list | tuple):
        raise UntypedSchemaError(f"{key} is {value!r}, expected a list")
    return list(value)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list | tuple) else value
