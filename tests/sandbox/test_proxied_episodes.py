"""Episodes behind the proxy: simulators, what must be allowed, and how they end."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.config import SandboxConfig
from sandbox.errors import SandboxLost, TaskError
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.proxied import check_proxy, split_owner
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.server import running
from sandbox.recording import record_task
from sandbox.task import TaskSpec, load_task
from tests.sandbox.proxied_tasks import (
    api_task,
    config,
    in_pool,
    play,
    raw,
    simulated,
    write_task,
)
from tests.sandbox.proxy.api import ApiServer


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


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
        in_pool(folder, config(), body)
        return

    async def served() -> None:
        async with running(ProxyConfig(state_dir=tmp_path / "p", default_mode="live")) as node:
            settings = config(proxy_socket=node.control_socket)
            await asyncio.to_thread(in_pool, folder, settings, body)
            assert node.proxy.num_episodes == 0
        lines = (tmp_path / "p" / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["policy_version"] for line in lines] == [None, None, 3, 3]

    asyncio.run(served())


def test_live_modes_must_be_allowed(tmp_path: Path, api: ApiServer) -> None:
    """One line that names the tool, the mode and the setting, before a box is taken."""
    live = load_task(api_task(tmp_path / "live", api, mode="live")).spec
    with pytest.raises(TaskError, match=r"'weather' has mode 'live'.*sandbox\.allow_live = true"):
        check_proxy(live, SandboxConfig())
    check_proxy(live, SandboxConfig(allow_live=True))
    check_proxy(load_task(simulated(tmp_path / "sim")).spec, SandboxConfig())

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

    in_pool(folder, config(), body)

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
