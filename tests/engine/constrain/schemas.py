"""Schemas of tool parameters: 100 and more, written for these tests, by what they exercise."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, **more}


STR: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUM: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}

_LEAVES: dict[str, Schema] = {
    "string": STR,
    "integer": INT,
    "number": NUM,
    "boolean": BOOL,
    "null": {"type": "null"},
    "min_length": {"type": "string", "minLength": 7},
    "max_length": {"type": "string", "maxLength": 3},
    "length_range": {"type": "string", "minLength": 2, "maxLength": 4},
    "empty_string_only": {"type": "string", "maxLength": 0},
    "minimum": {"type": "integer", "minimum": 1000},
    "maximum": {"type": "integer", "maximum": -5},
    "range": {"type": "integer", "minimum": 95, "maximum": 105},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "number_range": {"type": "number", "minimum": -0.5, "maximum": 0.25},
    "number_exclusive": {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    "number_from": {"type": "number", "minimum": 2.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 999},
    "enum": {"type": "string", "enum": ["red", "green", "blue"]},
    "enum_prefixes": {"enum": ["a", "ab", "abc", "abcdefghijklmnop"]},
    "enum_mixed": {"enum": ["a", 1, 2.5, True, None]},
    "enum_structures": {"enum": [{"k": [1, 2]}, [], "x"]},
    "enum_unicode": {"enum": ["北京", "São Paulo", "naïve", "🙂"]},
    "enum_quotes": {"enum": ['say "hi"', "back\\slash", "new\nline", "tab\t"]},
    "const": {"const": "fixed"},
    "const_number": {"const": 42},
    "const_object": {"const": {"a": {"b": []}}},
    "pattern_plate": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "pattern_digit_class": {"type": "string", "pattern": r"^\d{3}-\d{2}$"},
    "pattern_inside": {"type": "string", "pattern": "foo"},
    "pattern_ends": {"type": "string", "pattern": "[0-9]$"},
    "pattern_choice": {"type": "string", "pattern": "^(cat|dog|elephant)s?$"},
    "pattern_plus": {"type": "string", "pattern": "^a+b$"},
    "pattern_email": {"type": "string", "pattern": r"^[a-z0-9]+@[a-z]+\.(com|org)$"},
    "pattern_hex": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    "date": {"type": "string", "format": "date"},
    "date_time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "types": {"type": ["string", "null"]},
    "types_many": {"type": ["integer", "boolean", "null", "string"]},
    "any_of": {"anyOf": [STR, INT]},
    "any_of_null": {"anyOf": [{"type": "null"}, obj({"deep": INT})]},
    "any_of_objects": {
        "anyOf": [
            obj({"kind": {"const": "circle"}, "r": NUM}),
            obj({"kind": {"const": "rect"}, "w": NUM, "h": NUM}),
        ]
    },
    "one_of_types": {"oneOf": [STR, BOOL]},
    "all_of": {"allOf": [{"type": "string"}, {"minLength": 3}]},
    "array": {"type": "array", "items": INT},
    "array_min": {"type": "array", "items": BOOL, "minItems": 3},
    "array_max": {"type": "array", "items": STR, "maxItems": 2},
    "array_exact": {"type": "array", "items": NUM, "minItems": 2, "maxItems": 2},
    "array_empty": {"type": "array", "items": STR, "maxItems": 0},
    "array_of_enums": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1},
    "array_nested": {"type": "array", "items": {"type": "array", "items": INT, "minItems": 1}},
    "array_of_objects": {"type": "array", "items": obj({"id": INT}), "minItems": 1},
    "array_untyped": {"type": "array"},
    "tuple": {"type": "array", "prefixItems": [STR, INT], "items": False, "minItems": 2},
    "anything": {},
    "true": True,  # pyright: ignore[reportAssignmentType]
    "object_open": {"type": "object"},
    "object_map": {"type": "object", "additionalProperties": INT},
    "object_map_strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "object_closed": {"type": "object", "properties": {}, "additionalProperties": False},
}

SCHEMAS: dict[str, Schema] = {
    **{f"one {name}": obj({"value": leaf}) for name, leaf in _LEAVES.items()},
    "empty object": {"type": "object", "properties": {}},
    "empty closed": {"type": "object", "properties": {}, "additionalProperties": False},
    "object alone": {"type": "object"},
    "all optional": obj({"a": INT, "b": STR, "c": BOOL}, []),
    "some optional": obj({"a": INT, "b": STR, "c": BOOL, "d": NUM}, ["b", "d"]),
    "optional closed": obj({"a": INT, "b": STR}, ["b"], additionalProperties=False),
    "optional last": obj({"a": INT, "b": obj({"c": STR}, [])}, ["a"]),
    "required unlisted": {"type": "object", "required": ["zz"], "properties": {"a": INT}},
    "additional typed": obj({"a": INT}, additionalProperties={"type": "boolean"}),
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_": INT},
        "additionalProperties": False,
    },
    "unicode keys": obj({"城市": STR, "größe": INT, "ключ": BOOL}),
    "odd keys": obj({'with "quotes"': INT, "back\\slash": INT, "with space": INT, "": INT}),
    "ten numbers": obj({f"n{i}": INT for i in range(10)}),
    "many fields": obj({f"field_{i}": [STR, INT, BOOL, NUM][i % 4] for i in range(24)}, []),
    "long names": obj({"a_rather_long_name_of_a_parameter_" * 2: STR}),
    "nested": obj({"a": obj({"b": obj({"c": obj({"d": INT})})})}),
    "nested arrays": obj({"m": {"type": "array", "items": {"type": "array", "items": NUM}}}),
    "nested optional": obj({"a": obj({"b": obj({"c": INT}, [])}, [])}, []),
    "nested enums": obj({"a": obj({"unit": {"enum": ["c", "f"]}, "mode": {"enum": [1, 2]}})}),
    "described": obj({"q": {**STR, "description": "query", "examples": ["x"], "default": "y"}}),
    "titled": {"title": "T", "$schema": "https://json-schema.org/draft/2020-12/schema", **obj({})},
    "defs": {**obj({"p": {"$ref": "#/$defs/P"}}), "$defs": {"P": obj({"x": NUM, "y": NUM})}},
    "definitions": {
        **obj({"p": {"$ref": "#/definitions/P"}}),
        "definitions": {"P": {"enum": ["u", "v"]}},
    },
    "defs twice": {
        **obj({"a": {"$ref": "#/$defs/L"}, "b": {"$ref": "#/$defs/L"}}),
        "$defs": {"L": {"type": "array", "items": {"$ref": "#/$defs/E"}}, "E": {"enum": [1, 2]}},
    },
    "recursive list": {
        **obj({"head": {"$ref": "#/$defs/N"}}),
        "$defs": {"N": obj({"v": INT, "next": {"$ref": "#/$defs/N"}}, ["v"])},
    },
    "recursive tree": {
        **obj({"tree": {"$ref": "#/$defs/T"}}),
        "$defs": {
            "T": obj({"name": STR, "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}})
        },
    },
    "recursive choice": {
        **obj({"e": {"$ref": "#/$defs/E"}}),
        "$defs": {
            "E": {
                "anyOf": [
                    INT,
                    obj({"op": {"enum": ["+", "-"]}, "l": {"$ref": "#/$defs/E"}, "r": INT}),
                ]
            }
        },
    },
    "any of at the root": {
        "type": "object",
        "anyOf": [obj({"id": INT}), obj({"name": {"type": "string", "minLength": 1}})],
    },
    "any of refs": {
        **obj({"v": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}}),
        "$defs": {"A": obj({"a": INT}), "B": obj({"b": STR})},
    },
    "all of objects": {"allOf": [obj({"a": INT}), obj({"b": STR})]},
    "all of a ref": {
        "allOf": [{"$ref": "#/$defs/Base"}, obj({"extra": BOOL})],
        "$defs": {"Base": obj({"id": INT})},
    },
    "weather": obj(
        {
            "location": {**STR, "description": "city"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        ["location"],
        additionalProperties=False,
    ),
    "booking": obj(
        {
            "guest": obj(
                {"name": {"type": "string", "minLength": 1}, "age": {**INT, "minimum": 0}}
            ),
            "rooms": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": obj(
                    {
                        "type": {"enum": ["single", "double", "suite"]},
                        "beds": {"type": "integer", "minimum": 1, "maximum": 4},
                        "extras": {"type": "array", "items": {"enum": ["spa", "view"]}},
                    },
                    ["type"],
                ),
            },
            "arrival": {"type": "string", "format": "date"},
        },
        ["guest", "rooms", "arrival"],
    ),
    "search": obj(
        {
            "query": STR,
            "filters": {
                "type": "array",
                "items": {
                    "anyOf": [
                        obj({"field": STR, "equals": {"anyOf": [STR, NUM, BOOL]}}),
                        obj(
                            {
                                "field": STR,
                                "between": {
                                    "type": "array",
                                    "items": NUM,
                                    "minItems": 2,
                                    "maxItems": 2,
                                },
                            }
                        ),
                    ]
                },
            },
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
            "sort": {"type": ["string", "null"], "enum": ["asc", "desc", None]},
        },
        ["query", "filters"],
    ),
    "money": obj(
        {
            "amount": {"type": "number", "minimum": 0},
            "currency": {"type": "string", "pattern": "^[A-Z]{3}$"},
        }
    ),
    "patch": obj(
        {
            "path": {"type": "string", "pattern": "^(/[a-z]+)+$"},
            "edits": {
                "type": "array",
                "minItems": 1,
                "items": obj({"line": {"type": "integer", "minimum": 1}, "text": STR}),
            },
        }
    ),
    "shell": obj(
        {"argv": {"type": "array", "items": STR, "minItems": 1}, "timeout": NUM}, ["argv"]
    ),
    "matrix": obj(
        {
            "rows": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": {"type": "array", "items": INT, "minItems": 2, "maxItems": 2},
            }
        }
    ),
    "headers": obj(
        {"url": STR, "headers": {"type": "object", "additionalProperties": STR}}, ["url", "headers"]
    ),
}
"""name -> parameters; the names are those of the tools too."""

FAST = (
    "one enum_unicode",
    "one pattern_plate",
    "one multiple",
    "all optional",
    "unicode keys",
    "recursive tree",
    "any of at the root",
    "weather",
    "booking",
    "empty object",
)
"""A few of each kind."""
