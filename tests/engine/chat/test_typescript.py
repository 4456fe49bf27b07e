"""Declarations in TypeScript: a golden for each form of schema, and what has no form."""

import pytest

from engine.chat.base import ToolDeclaration
from engine.chat.typescript import UntypedSchemaError, declare_in_typescript


def declared(schema, description="") -> str:
    """The lines of one tool between the braces of the namespace."""
    text = declare_in_typescript([ToolDeclaration("f", description, schema)])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def of(field) -> str:
    """The type of one required field "x"."""
    text = declared({"type": "object", "properties": {"x": field}, "required": ["x"]})
    return text.removeprefix("type f = (_: {\n").removesuffix("\n}) => any;")


def test_whole_declaration():
    """Tools in the order given, each under its description."""
    weather = ToolDeclaration(
        "get_weather",
        "Get weather.\n\nNow.",
        {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "city": {"type": "string", "description": "The city"},
                "area": {"type": "integer"},
            },
            "required": ["city", "area"],
        },
    )
    assert declare_in_typescript([weather, ToolDeclaration("now", "", {})]) == (
        "# Tools\n\n"
        "## functions\n"
        "namespace functions {\n"
        "// Get weather.\n"
        "\n"
        "// Now.\n"
        "type get_weather = (_: {\n"
        "  area: number,\n"
        "  // The city\n"
        "  city: string,\n"
        '  // Default: "c"\n'
        '  unit?: "c" | "f"\n'
        "}) => any;\n"
        "type now = (_: {}) => any;\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"type": "string"}, "  x: string"),
        ({"type": "integer"}, "  x: number"),
        ({"type": "boolean", "default": True}, "  // Default: True\n  x: boolean"),
        ({"type": "number", "default": 1.5}, "  // Default: 1.5\n  x: number"),
        ({"type": "null"}, "  x: null"),
        (True, "  x: any"),
        (False, "  x: null"),
        ({}, "  x: any"),
        ({"type": ["integer", "null"]}, "  x: number | null"),
        ({"type": ["object", "array"]}, "  x: {} | Array<any>"),
        ({"enum": ["a", 1, None, True]}, '  x: "a" | 1 | None | True'),
        ({"enum": ["a", None], "type": ["null", "string"]}, '  x: "a" | None'),
        (
            {"type": "string", "pattern": "^a", "minLength": 1, "maxLength": 2, "maximum": 3},
            "  // maxLength: 2, minLength: 1, pattern: ^a\n  x: string",
        ),
        (
            {"type": "integer", "minimum": 0, "maximum": 9, "description": "n\nm"},
            "  // n\n  // m\n  // maximum: 9, minimum: 0\n  x: number",
        ),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "  x: string | Array<any>"),
        ({"type": "array", "items": {"type": "string"}}, "  x: Array<string>"),
        ({"type": "array", "minItems": 1}, "  // minItems: 1\n  x: Array<any>"),
        (
            {"type": "array", "items": {"type": "string", "description": "one"}},
            "  x: Array<\n    // one\n    string\n  >",
        ),
        ({"type": "object"}, "  x: {}"),
        (
            {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": True},
            "  x: {\n    b?: null,\n    [k: string]: any\n  }",
        ),
        (
            {"type": "object", "additionalProperties": False},
            "  x: {\n    [k: string]: never\n  }",
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "  x: {\n    [k: string]: number\n  }",
        ),
        (
            {"type": "array", "default": [{"b": 1, "a": "读"}]},
            '  // Default: [{"a": "读", "b": 1}]\n  x: Array<any>',
        ),
    ],
)
def test_fields(field, text):
    """One form each."""
    assert of(field) == text


def test_definitions_become_interfaces():
    """In front of the tool, with their own description."""
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/Point"}},
        "$defs": {
            "Point": {
                "type": "object",
                "description": "A place",
                "properties": {"y": {"type": "number"}, "next": {"$ref": "#/$defs/Point"}},
            }
        },
    }
    assert declared(schema, "Go") == (
        "// A place\n"
        "interface Point {\n  next?: Point,\n  y?: number\n}\n"
        "// Go\n"
        "type f = (_: {\n  p?: Point\n}) => any;"
    )


def test_a_schema_that_refers_to_itself():
    """Its own parameters become an interface; there, keys keep their order by name alone."""
    schema = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "child": {"$ref": "#"}},
        "required": ["value"],
    }
    assert declared(schema) == (
        "interface parameters {\n  child?: parameters,\n  value: number\n}\n"
        "type f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"oneOf": [{"const": 1}]}, "only oneOf has no type"),
        ({"description": "d"}, "only description has no type"),
        ({"$ref": "#/$defs/Nowhere"}, "neither # nor in"),
        ({"$ref": "other.json"}, "neither # nor in"),
        ({"type": ["string", "date"]}, "type 'date' is none of"),
        ({"enum": [1], "type": "string"}, "enum value 1 is no string"),
        ({"enum": [1], "type": ["string", "integer"]}, "more than one type"),
        ({"enum": "ab"}, "expected a list"),
        ("string", "is no JSON object"),
        ({"type": "object", "$defs": {"D": True}}, "expected an object"),
    ],
)
def test_schemas_without_a_form(field, reason):
    """The tool and the reason are named."""
    with pytest.raises(UntypedSchemaError, match=f"tool f: .*{reason}"):
        of(field)
