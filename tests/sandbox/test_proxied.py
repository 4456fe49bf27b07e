"""Tasks whose tools the proxy serves, played through a pool: real APIs, servers and simulators."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.backends.base import Level
from sandbox.check.findings import Step
from sandbox.check.run import CheckSettings, check_folder
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxLost, TaskError
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.proxied import check_proxy, split_owner
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.server import running
from sandbox.recording import record_task
from sandbox.session import Observation, RawCall, Stop
from sandbox.task import TaskSpec, load_task
from sandbox.tool_session import ToolSession
from tests.sandbox.conftest import need
from tests.sandbox.proxy.api import ApiServer

SERVER = Path(__file__).parent / "proxy" / "mcp_server.py"
WEATHER = RawCall("functions.weather:0", '{"city": "Oslo"}')

TASK = """
schema_version = "1.4"
[task]
name = "acme/proxied"
[metadata.parl]
task_type = "proxied"
[metadata.parl.budget]
call_timeout_s = 20
"""
TOOLS = '''
from sandbox.toolkit import tool

@tool(effect="read")
def double(number: int) -> str:
    """Twice the number."""
    return str(2 * number)
'''
VERIFY = """
def verify(final_text, end_state, data):
    return {"correctness": float(final_text.strip() == data["answer"])}
"""
SIMULATOR = '''
from sandbox.toolkit import ToolError, tool

stock = {}

def setup(data):
    stock.update(data["stock"])

@tool(effect="write")
def take(name: str, count: int) -> dict:
    """Take goods from the stock."""
    if stock[name] < count:
        raise ToolError(f"only {stock[name]} {name} left")
    stock[name] -= count
    return {"left": stock[name]}
'''


def write_task(folder: Path, proxy: str, calls: list[dict[str, Any]] | None = None) -> Path:
    """A task folder with one tool in the box and what ``proxy`` (TOML) declares beside it."""
    files = {
        "task.toml": TASK + proxy,
        "instruction.md": "Tell twice the temperature in Oslo.",
        "tools/tools.py": TOOLS,
        "tests/verify.py": VERIFY,
        "tests/data.json": json.dumps({"answer": "42"}),
        "environment/data.json": json.dumps({"stock": {"bolt": 3}}),
        "solution/calls.jsonl": "".join(
            json.dumps(line) + "\n" for line in [*(calls or []), {"final_text": "42"}]
        ),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


CALLS = [
    {"name": "weather", "arguments": {"city": "Oslo"}},
    {"name": "add_item", "arguments": {"name": "bolt"}},
    {"name": "double", "arguments": {"number": 21}},
]


def api_task(folder: Path, api: ApiServer, extra: str = "", mode: str = "replay") -> Path:
    """weather, add_item, list_items, fail, drop and status of the test API behind the proxy."""
    proxy = f"""
[metadata.parl.proxy.upstreams.api]
kind = "openapi"
document = "tools/openapi.json"
cassette = "cassettes/api.jsonl"
mode = "{mode}"
include = ["weather", "add_item", "list_items", "status", "drop"]
{extra}
"""
    write_task(folder, proxy, CALLS)
    api.write_document(folder / "tools")
    return folder


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


def operator(folder: Path, api: ApiServer) -> Path:
    """proxy.toml of a node that may reach the test API."""
    path = folder / "proxy.toml"
    path.write_text(
        f'state_dir = "{folder / "state"}"\nretry = {{backoff_s = 0.01, max_attempts = 2}}\n'
        f'network = {{allow_addresses = ["127.0.0.1:{api.port}"]}}\n'
    )
    return path


def config(**changes: Any) -> SandboxConfig:
    need(Level.A)
    return SandboxConfig.model_validate({"level": "A", **changes})


Body = Callable[[SandboxPool, TaskSpec], Awaitable[Any]]


def in_pool(folder: Path, settings: SandboxConfig, body: Body, record: bool = False) -> Any:
    """Run ``await body(pool, spec)`` with one box."""

    async def go() -> Any:
        loaded = load_task(folder, record=record)
        pool = SandboxPool(loaded.bundle, size=1, leases=MemoryLeases(), config=settings)
        await pool.start()
        try:
            return await body(pool, loaded.spec)
        finally:
            await pool.close()

    return asyncio.run(go())


async def play(session: ToolSession, *calls: RawCall) -> list[Observation]:
    """Start, call until something stops it."""
    assert (await session.start()).stop is None
    seen: list[Observation] = []
    for call in calls:
        seen.append(await session.call(call))
        if seen[-1].stop is not None:
            break
    return seen


def raw(tool: str, **arguments: Any) -> RawCall:
    return RawCall(tool, json.dumps(arguments))


def audit(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*/audit.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_api_is_recorded_and_then_replayed_without_it(tmp_path: Path, api: ApiServer) -> None:
    """The solution is played against the real API once; then the server is gone, and proxied and
    boxed tools answer in one episode, with digests, repairs and call numbers on record."""
    folder = api_task(tmp_path / "task", api)
    recording = config(allow_live=True, proxy_file=operator(tmp_path, api))
    played = asyncio.run(record_task(folder, recording, MemoryLeases()))
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
        verdict = await session.verify("42")
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
    (tmp_path / "two" / "cassettes").mkdir()
    (tmp_path / "two" / "cassettes" / "api.jsonl").write_text("{}\n")
    assert load_task(tmp_path / "two").spec.content_hash != spec.content_hash


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
args = ["{script}"]
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
    proxy = MCP.format(command=sys.executable, script=SERVER)
    folder = write_task(tmp_path / "task", proxy, NOTES)
    with pytest.raises(TaskError, match=r"no tools on the cassette .*record it first"):
        load_task(folder)
    settings = config(allow_live=True)
    played = asyncio.run(record_task(folder, settings, MemoryLeases()))
    assert played.passed and not played.errors, played
    write_task(folder, MCP.format(command="/no/such/server", script=SERVER), NOTES)

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


SIMULATED = '\n[metadata.parl.proxy.upstreams.stock]\nkind = "python"\nsource = "tools/stock.py"\n'


def simulated(folder: Path) -> Path:
    write_task(folder, SIMULATED)
    (folder / "tools" / "stock.py").write_text(SIMULATOR)
    return folder


@pytest.mark.parametrize("door", ["in_process", "socket"])
def test_a_simulator_has_a_state_for_each_episode(tmp_path: Path, door: str) -> None:
    """It is set up with the instance's data; its refusals are observations. The same over the
    control socket, where nothing is left open."""
    folder = simulated(tmp_path / "task")
    calls = [raw("take", name="bolt", count=2), raw("take", name="bolt", count=2)]

    async def body(pool: SandboxPool, spec: TaskSpec) -> None:
        for owner in ("a", "b@3"):
            session = await pool.acquire(spec, owner=owner)
            seen = await play(session, *calls)
            await session.close()
            assert [(each.text, each.error) for each in seen] == [
                ('{"left": 1}', None),
                ("tool_error: only 1 bolt left", "tool_error"),
            ]

    if door == "in_process":
        in_pool(folder, config(unsafe_local=True), body)
        return

    async def served() -> None:
        async with running(ProxyConfig(state_dir=tmp_path / "p", default_mode="live")) as node:
            settings = config(proxy_socket=node.control_socket)
            await asyncio.to_thread(in_pool, folder, settings, body)
            assert node.proxy.num_episodes == 0
        lines = (tmp_path / "p" / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["policy_version"] for line in lines] == [None, None, 3, 3]

    asyncio.run(served())


def test_live_modes_and_host_code_must_be_allowed(tmp_path: Path, api: ApiServer) -> None:
    """One line that names the tool, the mode and the setting, before a box is taken."""
    live = load_task(api_task(tmp_path / "live", api, mode="live")).spec
    with pytest.raises(TaskError, match=r"'weather' has mode 'live'.*sandbox\.allow_live = true"):
        check_proxy(live, SandboxConfig(), trusted=True)
    check_proxy(live, SandboxConfig(allow_live=True), trusted=True)
    folder = simulated(tmp_path / "sim")
    spec = load_task(folder).spec
    with pytest.raises(BackendUnavailable, match="unsafe_local"):
        check_proxy(spec, SandboxConfig(), trusted=False)
    check_proxy(spec, SandboxConfig(), trusted=True)

    async def body(pool: SandboxPool, spec: TaskSpec) -> int:
        with pytest.raises(TaskError, match="allow_live"):
            await pool.acquire(spec, owner="e")
        return pool.stats.lent

    assert in_pool(tmp_path / "live", config(), body) == 0
    with pytest.raises(TaskError, match="allow_live"):
        asyncio.run(record_task(tmp_path / "live", SandboxConfig(), MemoryLeases()))


def test_episodes_are_closed_on_errors_and_cancellation(tmp_path: Path) -> None:
    """No box in time, a caller that goes away while it waits, a proxy that is gone: the same id can
    be opened again, and the box is back."""
    folder = simulated(tmp_path / "task")

    async def body(pool: SandboxPool, spec: TaskSpec) -> None:
        held = await pool.acquire(spec, owner="held")
        with pytest.raises(Exception, match="box"):
            await pool.acquire(spec, owner="late", timeout_s=0.1)
        waiting = asyncio.ensure_future(pool.acquire(spec, owner="late"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        early = asyncio.ensure_future(pool.acquire(spec, owner="late"))
        await asyncio.sleep(0)  # inside open
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        await held.close()
        again = await pool.acquire(spec, owner="late")
        assert (await play(again, raw("take", name="bolt", count=1)))[0].error is None
        await again.close()
        await again.close()

    in_pool(folder, config(unsafe_local=True), body)

    async def gone(pool: SandboxPool, spec: TaskSpec) -> None:
        with pytest.raises(SandboxLost, match="does not answer"):
            await pool.acquire(spec, owner="e")

    in_pool(folder, config(proxy_socket=tmp_path / "none.sock"), gone)


def test_a_dead_workers_episode_is_taken_over(tmp_path: Path) -> None:
    """A worker that was killed left its episode open at the node's proxy; the next attempt has the
    same id."""
    folder = simulated(tmp_path / "task")

    async def abandon(pool: SandboxPool, spec: TaskSpec) -> None:
        await pool.acquire(spec, owner="e")  # never closed

    async def attempt(pool: SandboxPool, spec: TaskSpec) -> None:
        session = await pool.acquire(spec, owner="e")
        seen = await play(session, raw("take", name="bolt", count=3))
        assert seen[0].text == '{"left": 0}'
        await session.close()

    async def served() -> None:
        async with running(ProxyConfig(state_dir=tmp_path / "p")) as node:
            settings = config(proxy_socket=node.control_socket)
            await asyncio.to_thread(in_pool, folder, settings, abandon)
            assert node.proxy.num_episodes == 1
            await asyncio.to_thread(in_pool, folder, settings, attempt)
            assert node.proxy.num_episodes == 0

    asyncio.run(served())


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ('kind = "openapi"\ndocument = "no.yaml"', "there is no file 'no.yaml'"),
        ('kind = "python"\nsource = "../x.py"', "leads out of the task folder"),
        ('kind = "python"\nsource = "tools/tools.py"', "both offer a tool 'double'"),
        ('kind = "mcp"\ncommand = "x"', "set cassette and record the task"),
        ('kind = "soap"', "metadata.parl.proxy: key"),
    ],
)
def test_a_wrong_section_is_one_line(tmp_path: Path, proxy: str, message: str) -> None:
    """With the file and the key."""
    write_task(tmp_path, f"[metadata.parl.proxy.upstreams.u]\n{proxy}\n")
    with pytest.raises(TaskError) as caught:
        load_task(tmp_path)
    text = str(caught.value)
    assert message in text and "\n" not in text and text.startswith(str(tmp_path / "task.toml"))
    assert text.count("metadata.parl.proxy:") <= 1


def test_owners_may_name_the_weights() -> None:
    """Only a number after the last @ is a version."""
    assert split_owner("run@x/0@12") == ("run@x/0", 12)
    assert split_owner("run@x/0") == ("run@x/0", None)
    assert split_owner("") == ("", None)
