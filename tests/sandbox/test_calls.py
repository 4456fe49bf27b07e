"""Decoding a call: names, JSON, schema, effect; golden cases; nothing raises, time is linear."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.calls.arguments import Arguments, parse_arguments
from sandbox.calls.decode import decode
from sandbox.calls.json_text import deepest
from sandbox.calls.policy import KeyTier, RepairMode, RepairPolicy
from sandbox.calls.schema import CompiledSchema
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError, CallErrorCode, DecodedCall, num_policy_repairs
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
OFF = RepairPolicy(RepairMode.OFF)
KEYS = Path(__file__).parents[1] / "data" / "cases" / "keys.json"


@pytest.mark.parametrize("case", json.loads(KEYS.read_text())["cases"], ids=lambda case: case["id"])
def test_golden_keys(case: dict[str, Any]):
    """Every golden case gives its result, or exactly its errors."""
    schema = {**case["schema"], "type": "object"}
    schema["properties"] = {name: {} for name in schema["properties"]}
    aliases = {name: tuple(others) for name, others in case.get("aliases", {}).items()}
    tools = ToolTable([ToolSpec("f", schema=schema, key_aliases=aliases)])
    found = decode(RawCall("f", json.dumps(case["arguments"])), tools)
    if "result" in case:
        assert isinstance(found, DecodedCall) and found.arguments == case["result"]
        changed = case["result"] != case["arguments"]
        assert bool(found.repairs) == changed
    else:
        assert isinstance(found, CallError) and found.code is CallErrorCode.BAD_ARGUMENTS
        assert sorted(found.details) == sorted(case["errors"])


@pytest.mark.parametrize(
    ("arguments", "said", "detail"),
    [
        ({}, "missing key 'key'", "missing:key"),
        ({"ke": "a"}, "unknown key 'ke': did you mean 'key'?; missing key 'key'", "unknown:ke"),
        ({"key": "a", "zz": 1}, "unknown key 'zz': known keys: inner, items, key", "unknown:zz"),
        ({"key": 5}, "key 'key': expected string, got 5", "invalid:key"),
        (
            {"key": "a", "mode": "fats"},
            "expected one of 'fast', 'slow', got 'fats'",
            "invalid:mode",
        ),
        (
            {"key": "a", "items": [1, "x"]},
            "'items.1': expected integer, got 'x'",
            "invalid:items.1",
        ),
        ({"key": "a", "inner": {"form": 1}}, "unknown key 'form' in 'inner'", "unknown:inner.form"),
        ({"key": "a", "inner": {"count": 10}}, "key 'inner.count': 10 breaks the rule maximum", ""),
        ({"key": None}, "key 'key': expected string, got null", "invalid:key"),
        ({"key": []}, "key 'key': expected string, got an array", "invalid:key"),
    ],
)
def test_schema_errors_name_key_type_and_nearest_key(arguments: dict, said: str, detail: str):
    """One short line per problem."""
    result = parse_arguments(json.dumps(arguments), TOOLS.schema("lookup"))
    assert isinstance(result, CallError) and result.code is CallErrorCode.BAD_ARGUMENTS
    assert said in result.message and "\n" not in result.message
    assert detail in result.details or not detail


def test_decode_gives_the_call_or_names_the_tool():
    """The three ways: a call, an argument error with its tool, a forbidden tool."""
    good = decode(RawCall("functions.lookup:0", '{"key":"a"}'), TOOLS)
    assert good == DecodedCall("lookup", {"key": "a"})
    bad = decode(RawCall("functions.lookup:0", "{}"), TOOLS)
    assert isinstance(bad, CallError) and bad.tool == "lookup"
    forbidden = decode(RawCall("functions.rm:0", "{}"), TOOLS)
    assert isinstance(forbidden, CallError) and forbidden.code is CallErrorCode.FORBIDDEN_TOOL
    assert "tools: a.b, get-news, lookup" in forbidden.message


def test_every_step_leaves_its_tag():
    """Name, JSON, key and type in one call; the raw text is the caller's and stays."""
    raw = RawCall("functionsLOOKUP1", '{"Key": "a", "itmes": ["1"], }')
    found = decode(raw, TOOLS)
    assert isinstance(found, DecodedCall) and found.arguments == {"key": "a", "items": [1]}
    assert found.repairs == (
        *("name:style", "json:trailing_comma", "key_style:Key->key"),
        *("key_fuzzy:itmes->items", "coerce:items[]"),
    )
    assert num_policy_repairs((*found.repairs, "result:key_alias:city->城市")) == 5
    assert raw.arguments_text.endswith(", }")


FUZZY, ALIAS, STYLE = '{"citty":"a"}', '{"城市":"a"}', '{"City":"a"}'


@pytest.mark.parametrize(
    ("effect", "mode", "progress", "cap", "accepted"),
    [
        ("read", "cost", 0.0, KeyTier.FUZZY, [FUZZY, ALIAS, STYLE]),
        ("write", "cost", 0.0, KeyTier.FUZZY, [ALIAS, STYLE]),
        ("destructive", "cost", 0.0, KeyTier.FUZZY, [STYLE]),
        ("read", "strict", 0.0, KeyTier.FUZZY, [STYLE]),
        ("read", "off", 0.0, KeyTier.FUZZY, []),
        ("read", "cost", 1.0, KeyTier.FUZZY, [FUZZY, ALIAS, STYLE]),
        ("read", "anneal", 0.0, KeyTier.FUZZY, [FUZZY, ALIAS, STYLE]),
        ("read", "anneal", 0.4, KeyTier.FUZZY, [ALIAS, STYLE]),
        ("read", "anneal", 0.7, KeyTier.FUZZY, [STYLE]),
        ("read", "anneal", 1.0, KeyTier.FUZZY, [STYLE]),
        ("write", "anneal", 0.0, KeyTier.FUZZY, [ALIAS, STYLE]),
        ("read", "cost", 0.0, KeyTier.ALIAS, [ALIAS, STYLE]),
        ("read", "cost", 0.0, KeyTier.EXACT, []),
    ],
)
def test_effect_mode_and_cap_decide_the_tier(effect, mode, progress, cap, accepted):
    """The lowest of the three wins; strict and the end of anneal keep the style tier."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = ToolTable([ToolSpec("f", schema=schema, effect=effect)])
    policy = RepairPolicy(RepairMode(mode), progress)
    found = {text: decode(RawCall("f", text), tools, policy, cap) for text in (FUZZY, ALIAS, STYLE)}
    assert [text for text, call in found.items() if isinstance(call, DecodedCall)] == accepted


def test_progress_is_a_share():
    """A step count in its place is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"repair progress 12: expected the share"):
        RepairPolicy(RepairMode.ANNEAL, 12)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lookup", '{"key":"a",}'),
        ("lookup", '{"key":"a"'),
        ("lookup", '{"key":"a","inner":"{}"}'),
        ("lookup", '{"key":"a","items":["1"]}'),
        ("lookup", '{"key":"a","mode":"FAST"}'),
        ("lookup", '"{}"'),
        ("lookup", '{"key":"a","key":"a"}'),
        ("Lookup", '{"key":"a"}'),
        ("functions_lookup_0", '{"key":"a"}'),
        (" lookup", '{"key":"a"}'),
    ],
)
def test_off_repairs_nothing(name: str, text: str):
    """What any other mode repairs with a tag, evaluation refuses."""
    assert isinstance(decode(RawCall(name, text), TOOLS, OFF), CallError)
    mended = decode(RawCall(name, text), TOOLS)
    if text == '"{}"':
        assert isinstance(mended, CallError) and mended.details == ("missing:key",)
    else:
        assert isinstance(mended, DecodedCall) and mended.repairs


def test_off_takes_what_is_right():
    """The affixes of the wire format are no repair, and 3.0 is an integer for JSON Schema."""
    found = decode(RawCall("functions.lookup:3", '{"key":"a","items":[3.0]}'), TOOLS, OFF)
    assert found == DecodedCall("lookup", {"key": "a", "items": [3.0]})


def test_a_call_that_was_cut_off_is_not_closed():
    """finish_reason "length": the writer meant to go on."""
    text = '{"key":"a","items":[1'
    assert isinstance(decode(RawCall("lookup", text), TOOLS), DecodedCall)
    cut = decode(RawCall("lookup", text, finish_reason="length"), TOOLS)
    assert isinstance(cut, CallError) and cut.details == ("truncated",)


@pytest.mark.parametrize(
    "piece",
    ['"', '\\"', "[", '{"a":', "\\", '"a",', "1,", "[]", "9", '"\\', '"key":1,', ", ", "```"],
)
def test_time_is_linear(piece: str):
    """Eight times the text takes at most about eight times as long, whatever is repeated."""

    def cost(repeats: int) -> float:
        text = '{"items":[' + piece * repeats
        best = float("inf")
        for _ in range(3):
            begin = time.process_time()
            deepest(text)
            parse_arguments(text, TOOLS.schema("lookup"))
            best = min(best, time.process_time() - begin)
        return best

    small, large = cost(10_000), cost(80_000)
    assert large < 8 * 4 * max(small, 2e-3)


@pytest.mark.parametrize("item", ['""', '{"citty":1}', '"[[[["', '"1"', "1.0"])
def test_a_megabyte_of_items_is_cheap(item: str):
    """Repair and validation of the longest list, all of it wrong, take seconds at most."""
    begin = time.process_time()
    text = '{"key":"a","items":[' + ",".join([item] * (900_000 // (len(item) + 1))) + "]}"
    parse_arguments(text, TOOLS.schema("lookup"))
    assert time.process_time() - begin < 5


def test_a_schema_that_is_none_is_refused():
    """The author learns it when the tools are loaded."""
    with pytest.raises(TaskError, match="tool 'x': not a JSON Schema"):
        ToolTable([ToolSpec("x", schema={"type": "strin"})])
    with pytest.raises(TaskError, match="result of tool 'x': not a JSON Schema"):
        ToolTable([ToolSpec("x", result_schema={"type": "strin"})])
    with pytest.raises(TaskError, match="defined twice"):
        ToolTable([ToolSpec("x"), ToolSpec("x")])
    with pytest.raises(TaskError):
        CompiledSchema({"required": "key"})


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9/x", "file:///etc/passwd"])
def test_a_schema_makes_the_host_fetch_nothing(uri: str):
    """References stay inside the schema."""
    with pytest.raises(TaskError, match=r"x': not a JSON Schema: .*not local; put it under"):
        ToolTable([ToolSpec("x", schema={"$ref": uri})])


def test_an_alias_of_two_tools_is_refused():
    """Which one runs must not depend on the order of the file."""
    with pytest.raises(TaskError, match="tool 'y': alias 'x' also names another tool"):
        ToolTable([ToolSpec("x"), ToolSpec("y", aliases=("x",))])
    with pytest.raises(TaskError, match="alias 'z'"):
        ToolTable([ToolSpec("x", aliases=("z",)), ToolSpec("y", aliases=("z",))])


def test_exact_arguments_pass_untouched():
    """No repair, no copy of meaning: what was right stays."""
    text = '{"key":"[1]","items":[1,2],"inner":{"count":3}}'
    assert parse_arguments(text, TOOLS.schema("lookup")) == Arguments(json.loads(text))
