"""Author's Python as tools: state per episode, no secrets, and an end for every process."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from sandbox.proxy.upstreams.simulator import PythonUpstream
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config, with_proxy

SOURCE = '''
import asyncio, os, time
from sandbox.toolkit import ToolError, new_id, now, tool, workdir

counter = 0
start = {}

def setup(data):
    start.update(data)
    (workdir() / "log").write_text("")

@tool(effect="write")
def count(step: int = 1) -> dict:
    """Count up."""
    global counter
    counter += step
    print("printed, not answered")
    with (workdir() / "log").open("a") as log:
        log.write(f"{counter} ")
    return {"counter": counter, "log": (workdir() / "log").read_text()}

@tool
def data() -> dict:
    return start

@tool
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"waited {seconds} in {workdir().name[:3]}"

@tool
def receipt() -> list:
    """What a real API would make up."""
    return [new_id("r-"), new_id("r-"), now(), now()]

@tool
async def late_receipt() -> list:
    return [new_id(), now()]

@tool
def refuse() -> str:
    raise ToolError("not today")

@tool
def crash() -> str:
    raise KeyError("bug")

@tool
def hang() -> str:
    time.sleep(600)

@tool
def variable(name: str) -> str:
    return str(os.environ.get(name))

@tool
def unspeakable() -> object:
    return {1, 2}
'''


def config(folder: Path, **upstream: Any) -> ProxyConfig:
    source = folder / "sim.py"
    source.write_text(SOURCE)
    sim = {"kind": "python", "source": str(source), **upstream}
    return ProxyConfig.model_validate(
        {"state_dir": str(folder / "state"), "worlds": {"w": {"upstreams": {"sim": sim}}}}
    )


def test_episodes_have_states_of_their_own(tmp_path: Path) -> None:
    """Globals and working directory are an episode's; its data is merged over the upstream's."""

    async def body(proxy: ToolProxy, token: str) -> None:
        other = await proxy.open_episode("f", "w", data={"seed": 2})
        for expected in (1, 2, 3):
            result = await proxy.call(token, "count", {})
            assert (result.value["counter"], result.mode) == (expected, "simulate")
        assert (await proxy.call(other.token, "count", {"step": 5})).value["log"] == "5 "
        assert (await proxy.call(token, "data", {})).value == {"seed": 1, "a": 0}
        assert (await proxy.call(other.token, "data", {})).value == {"seed": 2, "a": 0}

    with_proxy(config(tmp_path, data={"seed": 1, "a": 0}), body)


def test_clock_and_identifiers_are_the_instances(tmp_path: Path) -> None:
    """Equal data, equal receipts, also of tools that wait; other data, other identifiers; nothing
    twice."""

    async def body(proxy: ToolProxy, token: str) -> list[Any]:
        told = []
        for name, data in (("a", {"n": 1}), ("b", {"n": 1}), ("c", {"n": 2, "now": 100})):
            episode = await proxy.open_episode(name, "w", data=data)
            results = [await proxy.call(episode.token, tool, {}) for tool in RECEIPTS]
            told.append([value for result in results for value in result.value])
        return told

    first, same, other = with_proxy(config(tmp_path), body)
    assert first == same and first[0].startswith("r-") and len({*first[:2], first[4]}) == 3
    assert first[2:4] + first[5:] == [1767225600.0 + second for second in range(3)]
    assert other[2:4] + other[5:] == [100.0, 101.0, 102.0]
    assert not {*first[:2], first[4]} & {*other[:2], other[4]}


RECEIPTS = ("receipt", "late_receipt")


def test_what_author_code_may_do_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is the model's to read; a crash, a hang or an answer that is no JSON is
    infrastructure; our environment is not there to be read."""
    monkeypatch.setenv("PARL_TEST_SECRET", "s3cr3t-value")

    async def body(proxy: ToolProxy, token: str) -> dict[str, ProxyResult]:
        names = ["refuse", "crash", "unspeakable", "hang"]
        results = {name: await proxy.call(token, name, {}) for name in names}
        results["variable"] = await proxy.call(token, "variable", {"name": "PARL_TEST_SECRET"})
        return results

    results = with_proxy(config(tmp_path, tools={"hang": {"timeout_s": 0.3}}), body)
    assert results["refuse"].text == "tool_error: not today" and not results["refuse"].infra
    for name in ("crash", "unspeakable", "hang"):
        assert (results[name].error, results[name].infra) == ("simulator_failed", True)
    assert "KeyError: 'bug'" in results["crash"].text
    assert results["variable"].text == "None"


def test_waiting_tools_run_side_by_side(tmp_path: Path) -> None:
    """200 coroutines of half a second in one process: none lost, in much less than their sum."""

    async def body(proxy: ToolProxy, token: str) -> float:
        begin = time.perf_counter()
        calls = [proxy.call(token, "wait", {"seconds": 0.5}) for _ in range(200)]
        results = await asyncio.gather(*calls)
        assert [result.error for result in results] == [None] * 200
        return time.perf_counter() - begin

    assert with_proxy(config(tmp_path), body) < 20


def test_a_killed_simulator_fails_its_calls_and_leaves_nothing(tmp_path: Path) -> None:
    """Calls in flight end at once, typed; the next world starts anew; no process is left."""

    async def body(proxy: ToolProxy, token: str) -> list[int]:
        await proxy.call(token, "count", {})
        upstream = proxy.episode(token).world.sources["sim"].upstream
        assert isinstance(upstream, PythonUpstream) and upstream.process.pid is not None
        guard = upstream.process.pid
        waiting = asyncio.ensure_future(proxy.call(token, "wait", {"seconds": 60}))
        await asyncio.sleep(0.2)
        (worker,) = map(int, Path(f"/proc/{guard}/task/{guard}/children").read_text().split())
        os.kill(worker, 9)
        result = await asyncio.wait_for(waiting, 10)
        assert (result.error, result.infra) == ("simulator_failed", True)
        lost = await proxy.call(token, "count", {})
        assert lost.infra and lost.error == "simulator_failed"
        return [guard, worker]

    for pid in with_proxy(config(tmp_path), body):
        assert not Path(f"/proc/{pid}").exists()


def test_python_tools_record_and_replay(tmp_path: Path) -> None:
    """The same cassettes as for any other kind."""
    cassette = str(tmp_path / "c.jsonl")

    async def body(proxy: ToolProxy, token: str) -> list[str]:
        script = [("data", {}), ("count", {}), ("data", {}), ("refuse", {})]
        return [(await proxy.call(token, tool, arguments)).text for tool, arguments in script]

    recorded = with_proxy(config(tmp_path, mode="record", cassette=cassette), body)
    assert with_proxy(config(tmp_path, mode="replay", cassette=cassette), body) == recorded


def test_a_simulator_stands_in_for_an_api(tmp_path: Path, api: ApiServer) -> None:
    """mode simulate of an OpenAPI tool: the document's schema and access rule, the author's
    function; the kill switch falls back to it where there is no cassette."""
    source = tmp_path / "sim.py"
    source.write_text(
        "from sandbox.toolkit import tool\n\n@tool\ndef weather(city: str) -> dict:\n"
        "    return {'city': city, 'celsius': -1}\n"
    )
    upstream = {"simulator": str(source), "cassette": None}

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        result = await proxy.call(token, "weather", {"city": "x"})
        assert (await proxy.call(token, "weather", {"town": "x"})).error == "bad_arguments"
        return result

    simulated = {**upstream, "include": ["weather"]}
    for mode, switch in (("simulate", False), ("live", True)):
        node = api_config(tmp_path, api, mode=mode, upstream=simulated, kill_switch=switch)
        result = with_proxy(node, body)
        assert (result.mode, result.value) == ("simulate", {"city": "x", "celsius": -1})
    assert not api.hits
