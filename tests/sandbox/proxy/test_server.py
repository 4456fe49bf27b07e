"""The node's process: its doors, its end, and what kill -9 leaves behind."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sandbox.errors import SandboxLost
from sandbox.proxy.client import ProxyClient, ProxyEpisode, open_local
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.errors import ProxyConfigError, ProxyError
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.server import RunningProxy, running
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config

ROOT = Path(__file__).parents[3]
SERVER = Path(__file__).with_name("mcp_server.py")


def served(config: ProxyConfig, body: Callable[[RunningProxy, ProxyClient], Awaitable[Any]]) -> Any:
    """Run ``await body(running proxy, control client)`` against real sockets."""

    async def go() -> Any:
        async with running(config) as found:
            client = ProxyClient(found.control_socket)
            try:
                return await body(found, client)
            finally:
                await client.close()

    return asyncio.run(go())


def agent(path: Path) -> httpx2.AsyncClient:
    """What code in a sandbox would use."""
    return httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=str(path)), base_url="http://tools"
    )


def test_both_doors(tmp_path: Path, api: ApiServer) -> None:
    """A session on the host and code in the sandbox reach the same episode; the agent's door has
    tools and calls and nothing else, and shows no address of an upstream."""

    async def body(found: RunningProxy, client: ProxyClient) -> None:
        episode = await client.open_episode("e", "w", policy_version=3)
        assert "weather" in {spec.name for spec in episode.tools}
        result = await episode.call("weather", {"city": "x"}, call_index=0, repairs=["key:style"])
        assert result.value == {"city": "x", "celsius": 21}
        headers = {"Authorization": f"Bearer {episode.token}"}
        async with agent(found.agent_socket) as http:
            listed = await http.get("/v1/tools", headers=headers)
            assert str(api.port) not in listed.text and "127.0.0.1" not in listed.text
            body = {"tool": "add_item", "arguments": {"name": "a"}}
            answer = await http.post("/v1/call", headers=headers, json=body)
            assert answer.json()["text"] == '{"id": 0}'
            for method, path in [
                ("POST", "/v1/episodes"),
                ("DELETE", "/v1/episodes"),
                ("POST", "/v1/kill_switch"),
                ("POST", "/v1/worlds"),
                ("GET", "/healthz"),
            ]:
                assert (await http.request(method, path, headers=headers)).status_code == 404
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{found.loopback_port}") as http:
            assert (await http.get("/v1/tools", headers=headers)).status_code == 200
        await episode.close()
        async with agent(found.agent_socket) as http:
            assert (await http.get("/v1/tools", headers=headers)).status_code == 401
        with pytest.raises(SandboxLost, match="BadToken"):
            await episode.call("weather", {"city": "x"})

    served(api_config(tmp_path, api, loopback_port=0), body)
    lines = [json.loads(line) for line in (tmp_path / "state/audit.jsonl").open()]
    assert [(line["call_index"], line["repairs"]) for line in lines] == [
        (0, ["key:style"]),
        (1, []),
    ]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({}, b"{}", 401),
        ({"Authorization": "Bearer wrong"}, b"{}", 401),
        ({"Authorization": "Basic TOKEN"}, b"{}", 401),
        ({"Authorization": "Bearer TOKEN"}, b"{", 400),
        ({"Authorization": "Bearer TOKEN"}, b"[]", 400),
        ({"Authorization": "Bearer TOKEN"}, b'{"tool": 1}', 400),
        ({"Authorization": "Bearer TOKEN"}, b'{"tool": "t", "repairs": []}', 400),
        ({"Authorization": "Bearer TOKEN"}, b"[" * 100_000, 400),
        ({"Authorization": "Bearer TOKEN"}, b" " * (9 << 20), 400),
    ],
)
def test_bad_requests_at_the_agents_door(
    tmp_path: Path, api: ApiServer, headers: dict[str, str], content: bytes, status: int
) -> None:
    """A status and one line, whatever a sandbox sends."""

    async def body(found: RunningProxy, client: ProxyClient) -> None:
        episode = await client.open_episode("e", "w")
        sent = {key: value.replace("TOKEN", episode.token) for key, value in headers.items()}
        async with agent(found.agent_socket) as http:
            answer = await http.post("/v1/call", headers=sent, content=content)
        assert answer.status_code == status and set(answer.json()) == {"error", "message"}
        assert "Traceback" not in answer.text

    served(api_config(tmp_path, api), body)


def test_sockets_have_owners_and_successors(tmp_path: Path, api: ApiServer) -> None:
    """The control door is the node user's alone; a second proxy on it is refused, the file of a
    dead one is replaced; both are gone after an orderly end."""
    config = api_config(tmp_path, api)
    (tmp_path / "state").mkdir()
    config.control_path.touch()

    async def body(found: RunningProxy, client: ProxyClient) -> None:
        assert stat.S_IMODE(found.control_socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(found.agent_socket.parent.stat().st_mode) & 0o002 == 0
        with pytest.raises(ProxyConfigError, match="another proxy serves here"):
            async with running(config):
                pass
        assert await client.health() == {"episodes": 0, "killed": False}
        await client.set_kill_switch(True)
        assert (await client.health())["killed"]
        with pytest.raises(ProxyConfigError, match="no world 'x'"):
            await client.open_episode("e", "x")
        await client.open_episode("e", "w")
        with pytest.raises(ProxyError, match="open already"):
            await client.open_episode("e", "w")

    served(config, body)
    assert not config.control_path.exists() and not config.agent_path.exists()


def test_worlds_come_at_run_time(tmp_path: Path, api: ApiServer) -> None:
    """One proxy serves many tasks; the same world again is free, another one is refused."""
    config = api_config(tmp_path, api)
    world = config.worlds["w"].model_dump(mode="json")

    async def body(found: RunningProxy, client: ProxyClient) -> None:
        assert "weather" in await client.add_world("task-2", world)
        assert "weather" in await client.add_world("task-2", world)
        world["upstreams"]["api"]["include"] = ["weather"]
        with pytest.raises(ProxyConfigError, match="another configuration"):
            await client.add_world("task-2", world)
        assert await client.add_world("task-3", world) == ["weather"]
        world["upstreams"]["api"]["document"] = str(tmp_path / "none.json")
        with pytest.raises(ProxyConfigError, match="No such file"):
            await client.add_world("task-4", world)

    served(config.model_copy(update={"worlds": {}}), body)


def test_local_and_remote_episodes_are_alike(tmp_path: Path, api: ApiServer) -> None:
    """A session cannot tell a proxy in its own process from one behind the socket."""

    async def use(episode: ProxyEpisode) -> Any:
        result = await episode.call("get_item", {"id": "3"}, call_index=0)
        await episode.close()
        await episode.close()
        return result.text, result.error, result.status, episode.tools, episode.cassettes

    async def local() -> Any:
        proxy = ToolProxy(api_config(tmp_path, api))
        try:
            await proxy.start()
            return await use(await open_local(proxy, "e", "w"))
        finally:
            await proxy.close()

    async def remote(found: RunningProxy, client: ProxyClient) -> Any:
        return await use(await client.open_episode("e", "w"))

    assert asyncio.run(local()) == served(api_config(tmp_path, api), remote)


# --- the process ------------------------------------------------------------------------------

SIMULATOR = """
import subprocess, tempfile
from sandbox.toolkit import tool, workdir

@tool
def spawn() -> list:
    (workdir() / "state").write_text("of this episode")
    tempfile.mkdtemp()
    child = subprocess.Popen(["sleep", "600"])
    daemon = subprocess.Popen(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"],
                              stdout=subprocess.PIPE, text=True, start_new_session=True)
    return [child.pid, int(daemon.stdout.readline())]
"""


def toml(folder: Path, *, with_mcp: bool, boxed: bool = False) -> Path:
    """Without boxes a tool's own process ids and files are the host's."""
    (folder / "sim.py").write_text(SIMULATOR)
    text = f"""
state_dir = "{folder}/state"
boxes = {{unsafe_local = {str(not boxed).lower()}, show = ["{SERVER.parent}"]}}
[worlds.w.upstreams.sim]
kind = "python"
source = "{folder}/sim.py"
"""
    if with_mcp:
        text += f"""
[worlds.w.upstreams.notes]
kind = "mcp"
mode = "live"
command = "{sys.executable}"
args = ["{SERVER}"]
tools.spawn = {{name = "spawn_mcp"}}
"""
    path = folder / "proxy.toml"
    path.write_text(text)
    return path


@contextlib.contextmanager
def process(config: Path) -> Iterator[subprocess.Popen[str]]:
    """``python -m sandbox.proxy``, ready."""
    temporary(config).mkdir(exist_ok=True)
    proxy = subprocess.Popen(
        [sys.executable, "-m", "sandbox.proxy", "--config", str(config)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary(config))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert proxy.stdout is not None
        assert proxy.stdout.readline().startswith("ready ")
        yield proxy
    finally:
        proxy.kill()
        proxy.wait(10)


def temporary(config: Path) -> Path:
    """Where the processes of a proxy keep what is to end with them."""
    return config.with_name("temporary")


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def gone(pids: list[int], within_s: float) -> bool:
    """Whether all processes end in time (a zombie has ended)."""
    return eventually(lambda: not any(alive(pid) for pid in pids), within_s)


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def spawn_everything(control: Path, tools: list[str]) -> list[int]:
    client = ProxyClient(control)
    try:
        episode = await client.open_episode("e", "w")
        results = [await episode.call(tool, {}) for tool in tools]
        assert [result.error for result in results] == [None] * len(tools)
        found: list[int] = []
        for result in results:
            value = result.value
            found += value["result"] if isinstance(value, dict) else value
        return found
    finally:
        await client.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
@pytest.mark.parametrize("boxed", [False, True], ids=["plain", "boxed"])
@pytest.mark.parametrize(
    "with_mcp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["python", "mcp"]
)
def test_nothing_outlives_the_proxy(
    tmp_path: Path, number: signal.Signals, with_mcp: bool, boxed: bool
) -> None:
    """Simulators and MCP servers, their children, daemons that left session and group, and their
    temporary folders all end with the proxy, however it ends."""
    with process(toml(tmp_path, with_mcp=with_mcp, boxed=boxed)) as proxy:
        tools = ["spawn", "spawn_mcp"] if with_mcp else ["spawn"]
        control = tmp_path / "state/control.sock"
        spawned = asyncio.run(spawn_everything(control, tools))
        if boxed:
            spawned = []  # numbers of the box's own namespace; its processes descend from the proxy
        assert all(alive(pid) for pid in spawned)
        # a helper that forked another one may just be ending
        pids = [pid for pid in {*spawned, *descendants(proxy.pid)} if alive(pid)]
        assert len(pids) >= 4 and len(list(temporary(tmp_path / "any").iterdir())) == len(tools)
        os.kill(proxy.pid, number)
        assert proxy.wait(20) == (0 if number == signal.SIGTERM else -number)
        assert gone(pids, 10)
        assert eventually(lambda: not any(temporary(tmp_path / "any").iterdir()), 10)


CLIENT = """
import asyncio, pathlib, sys, time
from tests.sandbox.proxy.test_server import spawn_everything
print(*asyncio.run(spawn_everything(pathlib.Path(sys.argv[1]), ["spawn"])), flush=True)
time.sleep(60)
"""


def test_an_episode_ends_with_the_process_that_opened_it(tmp_path: Path) -> None:
    """kill -9 of the owner: the proxy lives on and lets go of what the episode held. An episode of
    another owner stays."""
    with process(toml(tmp_path, with_mcp=False)) as proxy:
        control = tmp_path / "state/control.sock"
        command = [sys.executable, "-c", CLIENT, str(control)]

        async def go() -> None:
            client = ProxyClient(control)
            owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            try:
                ours = await client.open_episode("ours", "w")
                await ours.call("spawn", {})
                assert owner.stdout is not None
                await asyncio.to_thread(owner.stdout.readline)
                assert (await client.health())["episodes"] == 2 and len(states()) == 2
                owner.kill()
                owner.wait()
                owner.stdout.close()
                deadline = time.monotonic() + 10
                while (await client.health())["episodes"] == 2 and time.monotonic() < deadline:
                    await asyncio.sleep(0.1)
                assert (await client.health())["episodes"] == 1 and len(states()) == 1
                assert (await ours.call("spawn", {})).error is None
            finally:
                owner.kill()
                await client.close()

        def states() -> list[Path]:
            return list(temporary(tmp_path / "any").rglob("state"))

        asyncio.run(go())
        assert proxy.poll() is None


def test_a_client_of_a_dead_proxy_is_told(tmp_path: Path) -> None:
    """Infrastructure, with what to do; a new proxy takes the sockets over."""
    config = toml(tmp_path, with_mcp=False)
    control = tmp_path / "state/control.sock"
    with process(config) as proxy:
        proxy.kill()
        proxy.wait(10)
        with pytest.raises(SandboxLost, match=r"start it with python -m sandbox\.proxy"):
            asyncio.run(spawn_everything(control, ["spawn"]))
        with process(config):
            assert len(asyncio.run(spawn_everything(control, ["spawn"]))) == 2


def test_a_wrong_configuration_ends_the_process_with_one_line(tmp_path: Path) -> None:
    """Exit code 2."""
    (tmp_path / "proxy.toml").write_text('state_dir = "s"\nkil_switch = true\n')
    done = subprocess.run(
        [sys.executable, "-m", "sandbox.proxy", "--config", str(tmp_path / "proxy.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "kil_switch" in done.stderr
