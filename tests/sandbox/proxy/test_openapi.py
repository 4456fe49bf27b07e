"""OpenAPI documents -> tools, arguments -> requests."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.proxy.errors import BadArguments, ProxyConfigError
from sandbox.proxy.upstreams.openapi_document import Operation, Parameter, read_document
from sandbox.proxy.upstreams.openapi_request import build_request

SERVER = urlsplit("https://api.example.com/base/v1")


def read(tmp_path: Path, paths: dict[str, Any], version: str = "3.0.3", **more: Any) -> Any:
    path = tmp_path / "api.json"
    info = {"title": "t", "version": "1"}
    path.write_text(json.dumps({"openapi": version, "info": info, "paths": paths, **more}))
    return read_document(path)


def operation(**fields: Any) -> dict[str, Any]:
    return {"responses": {"200": {"description": "ok"}}, **fields}


def test_parameters_and_body_become_one_schema(tmp_path: Path) -> None:
    """Parameters of path item and operation, a flat body, a circle of references, 3.0 keywords."""
    components = {
        "schemas": {
            "Node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/components/schemas/Node"}},
            }
        },
        "parameters": {
            "Limit": {
                "name": "limit",
                "in": "query",
                "schema": {
                    "type": "integer", "minimum": 0, "exclusiveMinimum": True, "nullable": True,
                },
            }
        },
    }  # fmt: skip
    body = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "node": {"$ref": "#/components/schemas/Node"}},
    }
    paths = {
        "/pets/{id}": {
            "parameters": [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}},
                {"$ref": "#/components/parameters/Limit"},
            ],
            "post": operation(
                requestBody={"required": True, "content": {"application/json": {"schema": body}}}
            ),
        }
    }
    (tool,) = read(tmp_path, paths, components=components).operations
    assert tool.name == "post_pets_id" and tool.body_keys == ("name", "node")
    assert tool.schema["required"] == ["id", "name"]
    limit = tool.schema["properties"]["limit"]
    assert limit == {"type": ["integer", "null"], "exclusiveMinimum": 0}
    assert tool.schema["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert tool.schema["$defs"]["Node"]["properties"]["next"] == {"$ref": "#/$defs/Node"}


def test_clashes_and_other_bodies(tmp_path: Path) -> None:
    """A name in two places gets its place in front; a body that cannot lie flat is one argument;
    a body that is no JSON makes no tool, and says why."""
    name = {"name": "q", "schema": {"type": "string"}}
    array = {"type": "array", "items": {"type": "string"}}
    paths = {
        "/a": {"get": operation(parameters=[{**name, "in": "query"}, {**name, "in": "header"}])},
        "/b": {
            "post": operation(
                requestBody={"required": True, "content": {"application/json": {"schema": array}}}
            )
        },
        "/c": {
            "post": operation(
                requestBody={"required": True, "content": {"multipart/form-data": {}}}
            )
        },
    }
    found = read(tmp_path, paths, version="3.1.0")
    clash, whole = found.operations
    assert set(clash.schema["properties"]) == {"query_q", "header_q"}
    assert whole.body_whole == "body" and whole.schema["properties"]["body"] == array
    assert found.skipped == ("POST /c: needs a body of multipart/form-data; only JSON can be sent",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("swagger: '2.0'", "expected an OpenAPI 3.0 or 3.1"),
        ("openapi: 3.0.0\ninfo: {title: t}\npaths: {}", "not valid at info"),
        ("a: [", "neither JSON nor YAML"),
        ("- 1", "expected an object"),
        ("a: &a [*a]", "an anchor inside itself"),
        (
            "a: &a [x]\nb: &b "
            + "[*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
            + "".join(
                f"{n}: &{n} [" + ", ".join([f"*{m}"] * 10) + "]\n"
                for m, n in zip("bcdefgh", "cdefghi", strict=True)
            ),
            "more than 500000 values",
        ),
        (
            "openapi: 3.0.0\ninfo: {title: t, version: '1'}\npaths:\n  /a:\n"
            "    $ref: 'http://169.254.169.254/x'",
            "leads out of the document",
        ),
        (
            "openapi: 3.0.0\ninfo: {title: t, version: '1'}\npaths:\n  /a:\n"
            "    $ref: '/etc/passwd#/x'",
            "leads out of the document",
        ),
    ],
)
def test_wrong_documents_are_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    """File, place and reason; a reference is never followed out of the document."""
    path = tmp_path / "api.yaml"
    path.write_text(text)
    with pytest.raises(ProxyConfigError, match=words) as caught:
        read_document(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def built(parameter: Parameter, value: Any, path: str = "/x") -> Any:
    tool = Operation("t", "GET", path, "", {}, (parameter,))
    return build_request(tool, SERVER, {parameter.argument: value}, {})


@pytest.mark.parametrize(
    ("style", "explode", "value", "query"),
    [
        ("form", True, ["a", "b c"], "q=a&q=b%20c"),
        ("form", False, ["a", "b,c"], "q=a,b%2Cc"),
        ("spaceDelimited", False, ["a", "b"], "q=a%20b"),
        ("pipeDelimited", False, ["a", "b"], "q=a%7Cb"),
        ("deepObject", True, {"a": 1, "b": True}, "q%5Ba%5D=1&q%5Bb%5D=true"),
        ("form", True, {"a": 1}, "a=1"),
        ("form", False, {"a": 1}, "q=a,1"),
        ("form", True, "a&b=c#d", "q=a%26b%3Dc%23d"),
        ("form", True, 2.0, "q=2"),
        ("form", True, None, ""),
    ],
)
def test_query_styles(style: str, explode: bool, value: Any, query: str) -> None:
    """As OpenAPI 3 defines them; a value cannot add a parameter."""
    request = built(Parameter("q", "q", "query", style, explode), value)
    assert request.encoded_query == query


def test_headers_take_no_line_breaks() -> None:
    """A value cannot add a header."""
    parameter = Parameter("h", "X-H", "header", "simple", False)
    assert built(parameter, ["a", "b"]).headers == (("X-H", "a,b"),)
    with pytest.raises(BadArguments, match="printable ASCII"):
        built(parameter, "a\r\nHost: evil")


@given(st.text())
def test_a_path_value_stays_one_segment(value: str) -> None:
    """Whatever the text: refused, or exactly one segment that decodes to it."""
    parameter = Parameter("id", "id", "path", "simple", False)
    try:
        request = built(parameter, value, "/items/{id}/end")
    except (BadArguments, UnicodeEncodeError):
        return
    parts = request.path.split("/")
    assert parts[:4] == ["", "base", "v1", "items"] and parts[5:] == ["end"]
    assert urlsplit(request.url).hostname == "api.example.com"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_query_value_stays_one_value(value: str) -> None:
    """It decodes to itself and to nothing else."""
    request = built(Parameter("q", "q", "query", "form", True), value)
    assert parse_qsl(urlsplit(request.url).query, keep_blank_values=True) == [("q", value)]
