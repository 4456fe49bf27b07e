"""Tool schemas from the syntax tree of tools.py."""

import pytest

from sandbox.errors import TaskError
from sandbox.tool_schema import tools_from_source
from sandbox.tool_spec import LoopSpec, PollSpec

SOURCE = '''
from typing import Literal
raise SystemExit("never run on the host")

@tool(effect="write", idempotent=True, aliases=("put",))
def store(key: str, values: list[int], mode: Literal["a", "b"] = "a", *, note: str | None = None):
    """Store values.

    More text.
    """

@tool
def now() -> str:
    "Time."

def helper(x): ...
'''
DECLARED = """
@tool(
    key_aliases={"city": ("town",)},
    result_schema={"type": "object", "properties": {"城市": {"type": "string"}}},
    result_aliases={"城市": ["place"]},
    loop={"poll": {"min_interval_s": 5, "max": 30}, "cursor_args": ["page"],
          "ignore_args": ["nonce"], "ignore_result": ["messageId"]},
)
def weather(city: str, page: int = 0, nonce: str = ""):
    "Weather."
"""


def test_signature_docstring_and_decorator_become_the_spec():
    """Types give the schema, defaults make arguments optional, the first paragraph describes."""
    store, now = tools_from_source(SOURCE)
    assert store.description == "Store values."
    assert (store.effect, store.idempotent, store.aliases) == ("write", True, ("put",))
    assert store.schema == {
        "type": "object",
        "properties": {
            "key": {"type": "string"},
            "values": {"type": "array", "items": {"type": "integer"}},
            "mode": {"enum": ["a", "b"], "default": "a"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["key", "values"],
        "additionalProperties": False,
    }
    assert now.schema["properties"] == {} and now.to_openai()["function"]["name"] == "now"


def test_the_decorator_declares_what_the_guards_need():
    """Aliases, the answer's schema and what the loop detector must know, as literals."""
    [weather] = tools_from_source(DECLARED)
    assert weather.key_aliases == {"city": ("town",)}
    assert weather.result_aliases == {"城市": ("place",)}
    assert weather.result_schema is not None and "城市" in weather.result_schema["properties"]
    assert weather.loop == LoopSpec(PollSpec(5, 30), ("page",), ("nonce",), ("messageId",))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(", "not valid Python"),
        ("x = 1", "no tool found"),
        ("@tool\ndef f(a): ...", "argument 'a' of tool 'f' has no type"),
        ("@tool\ndef f(a: set): ...", "type 'set' has no JSON Schema"),
        ("@tool\ndef f(*a: str): ...", "may not take"),
        ("@tool(loop={'pol': 1})\ndef f(): ...", "option 'loop.pol' = 1"),
        ("@tool(effect='raed')\ndef f(): ...", "option 'effect' = 'raed'"),
        ("@tool(result_schema='x')\ndef f(): ...", "option 'result_schema' = 'x'"),
        ("@tool(efect='read')\ndef f(): ...", "no option 'efect'"),
        ("@tool\nasync def f(): ...", "is async"),
        ("@tool\ndef f(a: int = g()): ...", "must be a literal"),
    ],
)
def test_mistakes_name_file_and_reason(source: str, said: str):
    """The author sees where and what."""
    with pytest.raises(TaskError, match=r"^tools/tools\.py") as caught:
        tools_from_source(source)
    assert said in str(caught.value)
