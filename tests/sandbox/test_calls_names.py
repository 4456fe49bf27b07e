"""Tool names: affixes, style, aliases, MCP servers; never by distance."""

import pytest

from sandbox.calls.names import parse_name
from sandbox.calls.types import CallError

TOOLS = ["lookup", "a.b", "get-news", "rm", "read_file", "mcp__files__write_file", "srv.list"]
ALIASES = {"查询": "lookup", "fetch": "lookup"}


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
def test_the_wire_format_is_no_repair(text: str, tool: str):
    """`functions.` and `:n` are taken off when a registered tool remains, in every mode."""
    for repair in (True, False):
        name = parse_name(text, TOOLS, ALIASES, repair=repair)
        assert not isinstance(name, CallError) and (name.tool, name.repairs) == (tool, ())


@pytest.mark.parametrize(
    ("text", "tool", "tag"),
    [
        ("functions.lookup:0\n", "lookup", "name:space"),
        ("functionslookup0", "lookup", "name:affix"),
        ("functions_read_file_3", "read_file", "name:affix"),
        ("lookup_12", "lookup", "name:affix"),
        ("functions:lookup", "lookup", "name:affix"),
        ("Lookup", "lookup", "name:style"),
        ("functions.readFile:0", "read_file", "name:style"),
        ("ｌｏｏｋｕｐ", "lookup", "name:style"),
        ("get_news", "get-news", "name:style"),
        ("functions.fetch:2", "lookup", "name:alias"),
        ("查询", "lookup", "name:alias"),
        ("functions.Fetch", "lookup", "name:alias"),
        ("functions.write_file:0", "mcp__files__write_file", "name:mcp_suffix"),
        ("list", "srv.list", "name:mcp_suffix"),
    ],
)
def test_repairs_of_names(text: str, tool: str, tag: str):
    """Each with its tag; none of them when repair is off."""
    name = parse_name(text, TOOLS, ALIASES)
    assert not isinstance(name, CallError) and (name.tool, name.repairs) == (tool, (tag,))
    assert isinstance(parse_name(text, TOOLS, ALIASES, repair=False), CallError)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("functions.lokup:0", "unknown_tool", "did you mean 'lookup'?"),
        ("functions.lookups:0", "unknown_tool", "did you mean 'lookup'?"),
        ("functions.lookup:x", "unknown_tool", "tools: a.b, get-news, lookup, mcp__files"),
        ("call_59adf", "unknown_tool", "tools: a.b"),
        ("r", "unknown_tool", "not a tool"),
        ("files__write_file", "unknown_tool", "did you mean"),
        ("", "unparsable", "write functions.NAME:INDEX"),
        (" \n", "unparsable", "no tool name"),
        ("look\nup", "unparsable", "no tool name"),
        ("x" * 300, "unparsable", "no tool name"),
        ("<|im_end|>", "unknown_tool", "<\\\\|im_end"),
    ],
)
def test_unknown_names_list_the_tools(text: str, code: str, said: str):
    """No edit distance picks a tool; the error lists them and breaks up special tokens."""
    result = parse_name(text, TOOLS, ALIASES)
    assert isinstance(result, CallError) and result.code == code and said in result.message


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("functionsrun5", ["run", "run5"]),
        ("LookUp", ["look_up", "lookup"]),
        ("read", ["a.read", "b.read"]),
        ("entity_delete", ["entity_update", "entity_deletes"]),
        ("drive_write", ["drive_read"]),
    ],
)
def test_two_readings_are_none(name: str, tools: list[str]):
    """Neither order nor likeness decides."""
    assert isinstance(parse_name(name, tools), CallError)
    assert isinstance(parse_name(name, tools[::-1]), CallError)


@pytest.mark.parametrize(
    ("name", "tools", "expected"),
    [
        ("functions.x", ["functions.x", "x"], "functions.x"),
        ("x:1", ["x:1", "x"], "x:1"),
        ("functions.run5", ["run", "run5"], "run5"),
        ("read", ["read", "a.read"], "read"),
    ],
)
def test_the_most_literal_reading_wins(name: str, tools: list[str], expected: str):
    """What is spelled exactly is never repaired."""
    result = parse_name(name, tools)
    assert not isinstance(result, CallError) and (result.tool, result.repairs) == (expected, ())
