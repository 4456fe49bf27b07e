"""No input of any bytes crashes the parser; what it lets through is valid and storable."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.calls.decode import decode
from sandbox.calls.policy import RepairMode, RepairPolicy
from sandbox.calls.results import ReadResult, UnparsedResult, read_result
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError, DecodedCall
from sandbox.session import RawCall
from sandbox.tool_spec import ToolSpec

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}},
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "max_price": {"type": "number", "multipleOf": 0.5},
        "mode": {"enum": ["fast", "slow", 3]},
        "place": {"anyOf": [PLACE, {"type": "null"}]},
        "items": {"type": "array", "items": PLACE, "uniqueItems": True},
        "tree": {"$ref": "#/$defs/tree"},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
TOOLS = ToolTable(
    [
        ToolSpec("search", schema=SCHEMA, key_aliases={"query": ("keywords",)}),
        ToolSpec("a.b", schema=SCHEMA, effect="write", aliases=("搜索",)),
        ToolSpec("mcp__x__drop", schema=SCHEMA, effect="destructive"),
        ToolSpec("free"),
    ],
    forbidden=["mcp__x__drop"],
)
NAMES = [
    "search",
    "functions.search:0",
    "functionssearch1",
    "Search",
    "drop",
    "搜索",
    "free",
    "a.b:",
]
POLICIES = [RepairPolicy(mode, 0.5) for mode in RepairMode]
GOOD = [
    '{"query":"x","limit":3,"max_price":1.5,"mode":"fast","place":{"city":"Paris","days":2}}',
    '{"items":[{"city":"a"},{"city":"b","days":"1"}],"headers":{"X-Trace":"1"},"tree":{"next":{}}}',
    '{"qurey":"x","Limit":"3","place":"{\\"citty\\":\\"北京\\"}","mode":"FAST"}',
    '```json\n{"query": "a\\nb", "limit": 1e2,}\n```',
    '"{\\"query\\": \\"\\\\ud83d\\\\ude00\\"}"',
]
PIECES = ['"', "\\", "{", "}", "[", "]", ",", ":", "\\u", "d800", "1e999", "NaN", "True", "\x00",
          "\ud800", "\ufeff", "```", "城", "\n", "9" * 400, '{"a":' * 40, "-", "e"]  # fmt: skip


def check(name: str, text: str, policy: RepairPolicy) -> None:
    """Decode once; the result is a valid, storable call or a short line."""
    found = decode(RawCall(name, text), TOOLS, policy)
    if isinstance(found, CallError):
        assert len(found.message) < 1000 and "\n" not in found.message
        found.message.encode()
        "".join(found.details).encode()
        return
    assert isinstance(found, DecodedCall) and TOOLS.schema(found.tool).is_valid(found.arguments)
    json.dumps(found.arguments, ensure_ascii=False, allow_nan=False).encode()
    assert len(found.repairs) <= 64 and all(len(tag) < 600 for tag in found.repairs)
    "".join(found.repairs).encode()
    if policy.mode is RepairMode.OFF:
        assert found.repairs == () and json.loads(text) == found.arguments


keys = st.sampled_from(
    ["query", "qurey", "Limit", "城市", "place", "items", "tree", "next", "mode"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys | st.text(max_size=8), inner, max_size=4)
        | inner.map(json.dumps)
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(
    st.text() | st.sampled_from(NAMES),
    st.text(st.characters())
    | st.text('{}[]",:\\ue0123456789.+-NaInfity \n')
    | st.binary().map(lambda data: data.decode("latin-1"))
    | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape"))
    | values.map(json.dumps),
    st.sampled_from(POLICIES),
)
def test_decode_never_raises(name: str, text: str, policy: RepairPolicy):
    """Any two strings, in any mode."""
    check(name, text, policy)


@settings(max_examples=200)
@given(values, st.sampled_from(POLICIES))
def test_decoding_twice_changes_nothing(value: Any, policy: RepairPolicy):
    """What one decoding lets through, written out again, needs no repair."""
    found = decode(RawCall("search", json.dumps(value)), TOOLS, policy)
    if isinstance(found, DecodedCall):
        again = decode(RawCall("search", json.dumps(found.arguments)), TOOLS, policy)
        assert isinstance(again, DecodedCall)
        if policy.mode is not RepairMode.OFF:
            assert (again.arguments, again.repairs) == (found.arguments, ())


@settings(max_examples=200)
@given(st.text() | values.map(json.dumps))
def test_reading_an_answer_never_raises(text: str):
    """Any answer is read or refused in one line."""
    schema = ToolTable([ToolSpec("f", result_schema=SCHEMA)]).result_schema("f")
    assert schema is not None
    found = read_result(text, schema)
    if isinstance(found, UnparsedResult):
        assert "\n" not in found.message and len(found.message) < 1000
    else:
        assert isinstance(found, ReadResult) and schema.is_valid(found.value)
        found.text.encode()


def mutated(random: Random) -> str:
    """A good call with a few edits: pieces cut out, doubled, swapped or put in."""
    text = random.choice(GOOD)
    for _ in range(random.randint(0, 4)):
        at, to = sorted((random.randint(0, len(text)), random.randint(0, len(text))))
        match random.randrange(4):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:to] + text[at:to] + text[to:]
            case 2:
                text = text[:at] + random.choice(PIECES) + text[at:]
            case 3:
                text = text[:at] + random.choice(GOOD)[at:to] + text[to:]
    return text


def random_text(random: Random) -> str:
    """Bytes of any kind as text."""
    if random.random() < 0.5:
        return "".join(random.choice(PIECES) for _ in range(random.randint(0, 30)))
    data = random.randbytes(random.randint(0, 60))
    return data.decode(random.choice(["latin-1", "utf-8", "utf-16-le"]), "replace")


def storm(count: int, seed: int) -> int:
    """Decode ``count`` random and mutated calls; returns how many could run."""
    random = Random(seed)
    ran = 0
    for number in range(count):
        name = random.choice(NAMES) if random.random() < 0.95 else random_text(random)
        text = mutated(random) if number % 4 else random_text(random)
        policy = random.choice(POLICIES)
        check(name, text, policy)
        ran += isinstance(decode(RawCall(name, text), TOOLS, policy), DecodedCall)
    return ran


def test_two_thousand_broken_calls():
    """A sample of the slow test."""
    assert storm(2000, seed=1) > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_broken_calls():
    """Random and mutated calls, each in a random mode."""
    assert storm(100_000, seed=2) > 5000
