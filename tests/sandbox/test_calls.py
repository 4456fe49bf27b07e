"""Strict decoding of calls: names, JSON, schema; never raises, linear time."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.calls.arguments import MAX_BYTES, deepest, parse_arguments, parse_object
from sandbox.calls.decode import decode
from sandbox.calls.names import parse_name
from sandbox.calls.schema import CompiledSchema
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError, CallErrorCode, DecodedCall
from sandbox.errors import TaskError
from sandbox.session import RawCall
from sandbox.task import ToolSpec

SCHEMA = {
    "type": "object",
    "properties": {
        "key": {"type": "string"},
        "mode": {"enum": ["fast", "slow"]},
        "items": {"type": "array", "items": {"type": "integer"}},
        "inner": {
            "type": "object",
            "properties": {"count": {"type": "integer", "maximum": 9}},
            "additionalProperties": False,
        },
    },
    "required": ["key"],
    "additionalProperties": False,
}
TOOLS = ToolTable(
    [ToolSpec("lookup", schema=SCHEMA), ToolSpec("a.b"), ToolSpec("get-news"), ToolSpec("rm")],
    forbidden=["rm"],
)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("functions.lookup:0", "lookup"),
        ("functions.lookup:17", "lookup"),
        ("lookup", "lookup"),
        ("lookup:3", "lookup"),
        ("functions.lookup", "lookup"),
        ("functions.a.b:0", "a.b"),
        ("functions.get-news:1", "get-news"),
    ],
)
def test_names_with_and_without_affixes(text: str, tool: str):
    """`functions.` and `:n` are taken off when a registered tool remains."""
    assert parse_name(text, list(TOOLS)) == tool


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("functions.lokup:0", "unknown_tool", "did you mean 'lookup'?"),
        ("functions.lookup:x", "unknown_tool", "tools: a.b, get-news, lookup, rm"),
        ("call_59adf", "unknown_tool", "tools: a.b"),
        ("functionslookup0", "unknown_tool", "not a tool"),
        ("", "unparsable", "write functions.NAME:INDEX"),
        ("lookup\n", "unparsable", "no tool name"),
        ("x" * 300, "unparsable", "no tool name"),
        ("<|im_end|>", "unknown_tool", "<\\\\|im_end"),
    ],
)
def test_unknown_names_list_the_tools(text: str, code: str, said: str):
    """No edit distance picks a tool; the error lists them and breaks up special tokens."""
    result = parse_name(text, list(TOOLS))
    assert isinstance(result, CallError) and result.code == code and said in result.message


@pytest.mark.parametrize(
    ("name", "tools", "expected"),
    [
        ("functions.x", ["functions.x", "x"], "functions.x"),
        ("x:1", ["x:1", "x"], "x:1"),
        ("functions.x:1", ["functions.x", "x:1"], None),
    ],
)
def test_the_most_literal_reading_wins(name: str, tools: list[str], expected: str | None):
    """An exact name is never stripped, and when stripping is needed some tool must remain."""
    result = parse_name(name, tools)
    assert result == expected if expected else result in tools


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"key": NaN}', "NaN is not a JSON number"),
        ('{"key": -Infinity}', "-Infinity is not a JSON number"),
        ('{"key": 1e999}', "too large"),
        ('{"key": 1, "key": 1}', "key 'key' is given twice"),
        ('["a"]', "must be one JSON object"),
        ('"{}"', "must be one JSON object"),
        ("", "not valid JSON"),
        ('{"key": "a"', "not valid JSON"),
        ('{"key": "a"} x', "not valid JSON: Extra data"),
        ('{"key": "a\nb"}', "control character"),
        ('{"key": "\\ud800"}', "surrogate"),
        ('{"key": "\ud800"}', "surrogate"),
        ('{"key": ' + "9" * 5000 + "}", "too many digits"),
        ("[" * 33 + "]" * 33, "nested 33 deep"),
        ("[" * 500_000, "nested 500000 deep"),
        ("{" + ",".join(f'"k{i}":1' for i in range(257)) + "}", "257 keys"),
        ('{"key": "' + "a" * MAX_BYTES + '"}', "longer than"),
        ('{"key": "' + "城" * (MAX_BYTES // 2) + '"}', "longer than"),
    ],
)
def test_bad_json_is_refused_with_a_short_reason(text: str, said: str):
    """Everything Python's parser is too kind about, and the limits."""
    result = parse_object(text)
    assert isinstance(result, CallError) and result.code is CallErrorCode.BAD_JSON
    assert said in result.message and len(result.message) < 200


@pytest.mark.parametrize(
    "text", ['{"key":"\\ud83d\\ude00"}', '{"key":"[[[{{{"}', '{"key":"\\"]"}', ' {"key":"a"}\n']
)
def test_good_json_passes(text: str):
    """Escaped pairs, brackets and quotes inside strings, outer white space."""
    assert parse_arguments(text, TOOLS.schema("lookup")) == json.loads(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "missing key 'key'"),
        ({"ke": "a"}, "unknown key 'ke': did you mean 'key'?"),
        ({"key": "a", "zzzz": 1}, "unknown key 'zzzz': known keys: inner, items, key, mode"),
        ({"key": 5}, "key 'key': expected string, got 5"),
        ({"key": "a", "mode": "fats"}, "key 'mode': expected one of 'fast', 'slow', got 'fats'"),
        ({"key": "a", "items": [1, "x"]}, "key 'items.1': expected integer, got 'x'"),
        ({"key": "a", "inner": {"cuont": 1}}, "unknown key 'cuont' in 'inner': did you mean"),
        ({"key": "a", "inner": {"count": 10}}, "key 'inner.count': 10 breaks the rule maximum"),
        ({"key": None}, "key 'key': expected string, got null"),
    ],
)
def test_schema_errors_name_key_type_and_nearest_key(arguments: dict, said: str):
    """One short line per problem."""
    result = parse_arguments(json.dumps(arguments), TOOLS.schema("lookup"))
    assert isinstance(result, CallError) and result.code is CallErrorCode.BAD_ARGUMENTS
    assert said in result.message and "\n" not in result.message


def test_decode_gives_the_call_or_names_the_tool():
    """The three ways: a call, an argument error with its tool, a forbidden tool."""
    good = decode(RawCall("functions.lookup:0", '{"key":"a"}'), TOOLS)
    assert good == DecodedCall("lookup", {"key": "a"})
    bad = decode(RawCall("functions.lookup:0", "{}"), TOOLS)
    assert isinstance(bad, CallError) and bad.tool == "lookup"
    forbidden = decode(RawCall("functions.rm:0", "{}"), TOOLS)
    assert isinstance(forbidden, CallError) and forbidden.code is CallErrorCode.FORBIDDEN_TOOL
    assert "tools: a.b, get-news, lookup" in forbidden.message


@settings(max_examples=300)
@given(
    st.text() | st.sampled_from(["lookup", "functions.lookup:0"]),
    st.text(st.characters())
    | st.text('{}[]",:\\ue0123456789.+-NaInfity \n')
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(json.dumps),
)
def test_decode_never_raises(name: str, arguments: str):
    """Any two strings give a call or a short one-line error that is valid UTF-8."""
    result = decode(RawCall(name, arguments), TOOLS)
    if isinstance(result, CallError):
        assert len(result.message) < 500 and "\n" not in result.message
        result.message.encode()
    else:
        json.dumps(result.arguments, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    "piece", ['"', '\\"', "[", '{"a":', "\\", '"a",', "1,", "[]", "9", '"\\', '"key":1,']
)
def test_time_is_linear(piece: str):
    """Eight times the text takes at most about eight times as long, whatever is repeated."""

    def cost(repeats: int) -> float:
        text = '{"items":[' + piece * repeats
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            deepest(text)
            parse_arguments(text, TOOLS.schema("lookup"))
            best = min(best, time.perf_counter() - begin)
        return best

    small, large = cost(10_000), cost(80_000)
    assert large < 8 * 4 * max(small, 2e-4)


def test_a_megabyte_of_wrong_items_is_cheap():
    """Validation looks at the first errors only."""
    begin = time.perf_counter()
    text = '{"key":"a","items":[' + ",".join(['""'] * 300_000) + "]}"
    result = parse_arguments(text, TOOLS.schema("lookup"))
    assert isinstance(result, CallError) and time.perf_counter() - begin < 3


def test_a_schema_that_is_none_is_refused():
    """The author learns it when the tools are loaded."""
    with pytest.raises(TaskError, match="tool 'x': not a JSON Schema"):
        ToolTable([ToolSpec("x", schema={"type": "strin"})])
    with pytest.raises(TaskError, match="defined twice"):
        ToolTable([ToolSpec("x"), ToolSpec("x")])
    with pytest.raises(TaskError):
        CompiledSchema({"required": "key"})
