"""[metadata.parl.tools.NAME] over the decorator, and what of the task the session needs."""

from sandbox.manifest.reading import parse_manifest
from sandbox.task import TaskSpec, ToolBundle, spec_from_manifest
from sandbox.tool_spec import LoopSpec, PollSpec

TOOLS = """
from sandbox.toolkit import tool

@tool(key_aliases={"city": ("town",)}, loop={"cursor_args": ["page"]},
      result_schema={"type": "object"})
def get(city: str, page: int = 0):
    "Get."

@tool
def put(city: str):
    "Put."
"""
MANIFEST = """
[task]
name = "org/name"
[metadata.parl]
task_type = "t"
key_repair = "alias"
state_digest = "digest"
[metadata.parl.tools.put]
effect = "write"
key_aliases = { city = ["place"] }
result = { type = "object", required = ["ok"] }
result_aliases = { ok = ["success"] }
loop = { poll = { min_interval_s = 1, max = 3 }, ignore_args = ["n"], ignore_result = ["id"] }
[metadata.parl.tools.get]
idempotent = true
"""


def spec_of(text: str) -> TaskSpec:
    bundle = ToolBundle("b", TOOLS, "")
    return spec_from_manifest(parse_manifest(text, "task.toml"), bundle, instruction="go")


def test_the_manifest_wins_where_it_says_something():
    """And what it leaves out stays as the decorator has it."""
    get, put = spec_of(MANIFEST).tools
    assert get.idempotent and get.key_aliases == {"city": ("town",)}
    assert get.loop == LoopSpec(cursor_args=("page",)) and get.result_schema == {"type": "object"}
    assert put.effect == "write" and put.key_aliases == {"city": ("place",)}
    assert put.result_schema == {"type": "object", "required": ["ok"]}
    assert put.result_aliases == {"ok": ("success",)}
    assert put.loop == LoopSpec(PollSpec(1, 3), ignore_args=("n",), ignore_result=("id",))


def test_cap_and_state_digest_reach_the_spec():
    """By default the tool's effect and the run decide, and no digest is asked for."""
    spec = spec_of(MANIFEST)
    assert (spec.key_repair, spec.state_digest) == ("alias", "digest")
    assert TaskSpec.from_json(spec.to_json()) == spec
    plain = spec_of('[task]\nname = "a/b"\n[metadata.parl]\ntask_type = "t"\n')
    assert (plain.key_repair, plain.state_digest) == ("fuzzy", None)
