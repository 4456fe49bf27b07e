"""Proxied tools are recorded, replayed, and held to the rules of all tools."""

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.backends.base import Level
from sandbox.check.findings import Step
from sandbox.check.run import CheckSettings, check_folder
from sandbox.errors import TaskError
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.proxy.cassette import Cassette
from sandbox.proxy.scrub import Scrubber
from sandbox.recording import record_task
from sandbox.session import RawCall, Stop
from sandbox.task import TaskSpec, load_task
from tests.sandbox.conftest import need
from tests.sandbox.proxied_tasks import (
    ANSWER,
    SERVER,
    WEATHER,
    api_task,
    audit,
    config,
    in_pool,
    operator,
    play,
    raw,
    write_task,
)
from tests.sandbox.proxy.api import ApiServer


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


def test_an_api_is_recorded_and_then_replayed_without_it(tmp_path: Path, api: ApiServer) -> None:
    """The solution is played against the real API once; then the server is gone, and proxied and
    boxed tools answer in one episode, with digests, repairs and call numbers on record."""
    folder = api_task(tmp_path / "task", api)
    recording = config(allow_live=True, proxy_file=operator(tmp_path, api))
    recorded = asyncio.run(record_task(folder, recording, MemoryLeases()))
    assert recorded.different is None and recorded.replayed is not None
    (added,) = recorded.added
    assert added.calls == {"GET /v1/weather": 1, "POST /v1/items": 1} and not added.scrubbed
    played = recorded.played
    assert played.passed and not played.errors, played
    assert api.hits["GET weather"] == api.hits["POST items"] == 1
    api.stop()

    async def body(pool: SandboxPool, spec: TaskSpec) -> Any:
        session = await pool.acquire(spec, owner="run/train/0/0/0@7")
        seen = await play(
            session,
            RawCall("functions.weather:0", '{"City": "Oslo"}'),  # a key to mend
            raw("double", number=21),
            raw("add_item", name="bolt"),
            raw("weather", city="Rome"),  # nobody recorded it
        )
        verdict = await session.verify(ANSWER)
        enforced = session.enforced
        await session.close()
        return spec, seen, verdict, enforced

    settings = config(proxy_dir=tmp_path / "node")
    spec, seen, verdict, enforced = in_pool(folder, settings, body)
    assert json.loads(seen[0].text) == {"city": "Oslo", "celsius": 21} and seen[0].repairs
    assert [observation.text for observation in seen[1:3]] == ["42", '{"id": 0}']
    assert seen[3].error == "infra_error" and "CASSETTE_MISS" in seen[3].text
    assert verdict.passed and api.hits["GET weather"] == 1
    (digest,) = enforced["cassettes"]
    assert len(digest) == 64 and enforced["memory_bytes"]
    lines = audit(tmp_path / "node")
    assert [line["call_index"] for line in lines] == [0, 2, 3]
    assert {(line["episode"], line["policy_version"]) for line in lines} == {("run/train/0/0/0", 7)}
    assert lines[0]["cassette_digest"] == digest and lines[0]["repairs"] == list(seen[0].repairs)
    assert spec.proxy is not None and spec.proxy.modes["weather"] == "replay"


def test_the_model_is_told_of_proxied_tools(tmp_path: Path, api: ApiServer) -> None:
    """Their declarations stand beside those of tools.py; the manifest adds names and schemas; a
    copy of the folder is the same task, a task that changed is not."""
    extra = """
[metadata.parl.tools.weather]
aliases = ["forecast"]
result = {properties = {temperature = {type = "number"}}, required = ["temperature"]}
result_aliases = {temperature = ["celsius"]}
"""
    spec = load_task(api_task(tmp_path / "one", api, extra)).spec
    tools = {tool.name: tool for tool in spec.tools}
    assert list(tools) == ["double", "weather", "list_items", "add_item", "status", "drop"]
    told = tools["weather"].to_openai()["function"]
    assert told["description"] == "Get weather." and "city" in told["parameters"]["properties"]
    assert (tools["weather"].effect, tools["add_item"].effect) == ("read", "write")
    assert tools["weather"].aliases == ("forecast",)
    assert TaskSpec.from_json(spec.to_json()) == spec
    copy = load_task(api_task(tmp_path / "two", api, extra)).spec
    assert copy.content_hash == spec.content_hash
    assert copy.proxy and spec.proxy and copy.proxy.world_name != spec.proxy.world_name
    cassette = Cassette(tmp_path / "two" / "cassettes" / "api.jsonl", Scrubber())
    cassette.path.parent.mkdir()
    cassette.record_tools("api", [])
    cassette.close()
    assert load_task(tmp_path / "two").spec.content_hash != spec.content_hash
    cassette.path.write_text("{}\n")
    with pytest.raises(TaskError, match=r"api\.jsonl:1: schema version None; expected 1"):
        load_task(tmp_path / "two")


def test_result_schemas_and_loops_hold_for_proxied_tools(tmp_path: Path, api: ApiServer) -> None:
    """The answer comes in the schema's words, one that does not fit ends the episode, and the fifth
    equal call is a loop."""
    extra = """
[metadata.parl.tools.weather]
result = {properties = {temperature = {type = "number"}}, required = ["temperature"]}
result_aliases = {temperature = ["celsius"]}
[metadata.parl.tools.list_items]
result = {type = "object", properties = {total = {type = "integer"}}, required = ["total"]}
"""
    folder = api_task(tmp_path / "task", api, extra, mode="live")

    async def body(pool: SandboxPool, spec: TaskSpec) -> Any:
        looping = await pool.acquire(spec, owner="a")
        first = await play(looping, *[WEATHER] * 9)
        await looping.close()
        unfit = await pool.acquire(spec, owner="b")
        second = await play(unfit, raw("list_items"))
        await unfit.close()
        illegal = await pool.acquire(spec, owner="c")
        third = await play(illegal, raw("get_item", id="1"), raw("get_item", id="1"))
        await illegal.close()
        return first, second, third

    settings = config(allow_live=True, proxy_file=operator(tmp_path, api))
    first, second, third = in_pool(folder, settings, body)
    assert json.loads(first[0].text)["temperature"] == 21 and len(first) == 5
    assert first[-1].stop is Stop.LOOP
    assert [observation.stop for observation in second] == [Stop.UNPARSED_RESULT]
    assert third[-1].stop is Stop.ILLEGAL_CALL  # the document has it, the task does not


def test_failures_of_the_api_are_told_apart(tmp_path: Path, api: ApiServer) -> None:
    """4xx is the caller's, 5xx nobody's, and a write whose answer is lost is said to be unknown in
    one line and sent once."""
    folder = api_task(tmp_path / "task", api, mode="live")

    async def body(pool: SandboxPool, spec: TaskSpec) -> Any:
        session = await pool.acquire(spec, owner="e")
        seen = await play(
            session, raw("status", code="404"), raw("status", code="503"), raw("drop", name="x")
        )
        await session.close()
        return seen

    settings = config(
        allow_live=True, proxy_file=operator(tmp_path, api), proxy_dir=tmp_path / "node"
    )
    refused, failed, unknown = in_pool(folder, settings, body)
    assert refused.error == "tool_error" and "upstream_4xx" in refused.text
    assert failed.error == "infra_error" and "upstream_5xx" in failed.text
    assert unknown.error == "infra_error" and unknown.text.startswith(
        "infra_error: outcome unknown: drop may or may not have taken effect"
    )
    assert "\n" not in unknown.text and api.dropped == 1
    assert [line["outcome"] for line in audit(tmp_path / "node")] == ["failed", "failed", "unknown"]


def test_a_slow_upstream_is_nobodys_fault(tmp_path: Path, api: ApiServer) -> None:
    """The session's own limit holds for proxied tools; a read is then a plain failure."""
    folder = api_task(tmp_path / "task", api, mode="live")
    toml = (folder / "task.toml").read_text().replace('"drop"]', '"slow"]')
    (folder / "task.toml").write_text(toml)

    async def body(pool: SandboxPool, spec: TaskSpec) -> Any:
        spec = replace(spec, limits=replace(spec.limits, call_timeout_s=0.2))
        session = await pool.acquire(spec, owner="e")
        seen = await play(session, raw("slow", seconds=0.6), raw("double", number=1))
        await session.close()
        return seen

    settings = config(allow_live=True, proxy_file=operator(tmp_path, api))
    late, double = in_pool(folder, settings, body)
    assert (late.error, late.text) == ("infra_error", "infra_error: no answer within 0.2 s")
    assert double.text == "2"


MCP = """
[metadata.parl.proxy.upstreams.notes]
kind = "mcp"
command = "{command}"
args = ["mcp_server.py"]
cwd = "tools"
cassette = "cassettes/notes.jsonl"
include = ["add_note", "list_notes"]
tools.list_notes = {{effect = "read"}}
tools.add_note = {{effect = "write"}}
"""
NOTES = [
    {"name": "add_note", "arguments": {"text": "buy milk"}},
    {"name": "list_notes", "arguments": {}},
]


@pytest.mark.slow
def test_an_mcp_server_is_recorded_and_then_replayed_without_it(tmp_path: Path) -> None:
    """Its tools are known from the cassette; before that the task says what to do."""
    proxy = MCP.format(command=sys.executable)
    folder = write_task(tmp_path / "task", proxy, NOTES)
    shutil.copy(SERVER, folder / "tools")
    with pytest.raises(TaskError, match=r"no tools on the cassette .*record it first"):
        load_task(folder)
    settings = config(allow_live=True)
    recorded = asyncio.run(record_task(folder, settings, MemoryLeases()))
    assert recorded.different is None and recorded.added[0].num_listings == 1
    played = recorded.played
    assert played.passed and not played.errors, played
    write_task(folder, MCP.format(command="/no/such/server"), NOTES)

    async def body(pool: SandboxPool, spec: TaskSpec) -> Any:
        assert [tool.name for tool in spec.tools] == ["double", "list_notes", "add_note"]
        session = await pool.acquire(spec, owner="e")
        seen = await play(session, *(raw(call["name"], **call["arguments"]) for call in NOTES))
        await session.close()
        return [observation.text for observation in seen]

    texts = in_pool(folder, config(), body)
    assert texts == [observation.text for observation in played.observations]
    assert "buy milk" in texts[1]


@pytest.mark.slow
def test_the_check_knows_recorded_tasks(tmp_path: Path, api: ApiServer) -> None:
    """Step "cassettes" fails before the recording and holds after it, with the API gone; the
    solution passes in every episode."""
    need(Level.A)
    folder = api_task(tmp_path / "task", api)
    settings = CheckSettings(repeat=2, config=config())

    def steps() -> dict[str, Step]:
        report = asyncio.run(check_folder(folder, settings))
        return {step.name: step for step in report.steps}

    assert "missing-cassette" in {each.rule for each in steps()["cassettes"].findings}
    recording = config(allow_live=True, proxy_file=operator(tmp_path, api))
    asyncio.run(record_task(folder, recording, MemoryLeases()))
    api.stop()
    found = steps()
    assert found["cassettes"].findings == [] and not found["cassettes"].skipped
    assert found["oracle"].findings == found["determinism"].findings == []
