"""Programs of a task's author run in boxes: what they can see, reach and use up."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.backends.base import Level
from sandbox.backends.cgroup import find_parents
from sandbox.backends.program_view import View, program_files
from sandbox.errors import BackendUnavailable
from sandbox.proxy.boxes import Boxes, installation_of
from sandbox.proxy.config import BoxesConfig, McpUpstream, ProxyConfig
from sandbox.proxy.errors import McpFailed
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from tests.sandbox.conftest import need
from tests.sandbox.proxy.conftest import with_proxy

PROBES = '''
import os, socket, subprocess
from pathlib import Path
from sandbox.toolkit import tool

@tool
def look() -> dict:
    """What there is to see."""
    return {
        "uids": [os.getuid(), os.geteuid()],
        "root": sorted(os.listdir("/")),
        "homes": [str(path) for path in (Path("/root"), Path("/home")) if path.exists()],
        "secret": os.environ.get("PARL_TEST_SECRET"),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
        "init": Path("/proc/1/cmdline").read_text().replace("\\0", " ")[:40],
        "caps": next(line for line in Path("/proc/self/status").read_text().splitlines()
                     if line.startswith("CapEff")).split()[1],
        "seccomp": next(line for line in Path("/proc/self/status").read_text().splitlines()
                        if line.startswith("Seccomp:")).split()[1],
    }

@tool
def reach(port: int) -> str:
    """Connect to a service of the host."""
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        return "connected"
    except OSError as error:
        return type(error).__name__

@tool
def read(path: str) -> str:
    """A file."""
    try:
        return Path(path).read_text()[:20]
    except OSError as error:
        return type(error).__name__

@tool
def write(path: str, mib: int = 0) -> str:
    """A file of that size."""
    try:
        with open(path, "wb") as file:
            for _ in range(mib):
                file.write(bytes(1 << 20))
            file.write(b"x")
        return "written"
    except OSError as error:
        return error.strerror

@tool
def hog(mib: int) -> int:
    """Use memory."""
    return len(bytearray(os.urandom(1 << 20) * mib))

@tool
def forks(count: int) -> int:
    """Start processes."""
    started = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen(["sleep", "60"]))
    except OSError:
        pass
    for each in started:
        each.kill()
    return len(started)

@tool
def say(size: int) -> str:
    """That many letters."""
    return "x" * size

@tool
def lie() -> str:
    """Answer in place of the worker, with what is no answer."""
    os.write(3, b'["no", "answer"]\\n')
    for fd in range(3, 20):
        try:
            os.write(fd, b"{not json}\\n")
        except OSError:
            pass
    return "lied"
'''


def simulator(folder: Path, **boxes: Any) -> ProxyConfig:
    source = folder / "probes.py"
    source.write_text(PROBES)
    return ProxyConfig.model_validate(
        {
            "state_dir": str(folder / "state"),
            "boxes": boxes,
            "limits": {"timeout_s": 20},
            "worlds": {"w": {"upstreams": {"sim": {"kind": "python", "source": str(source)}}}},
        }
    )


def calls(config: ProxyConfig, *script: tuple[str, dict[str, Any]]) -> list[ProxyResult]:
    async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
        return [await proxy.call(token, tool, arguments) for tool, arguments in script]

    return with_proxy(config, body)


def cgroups(max_processes: int) -> list[Path]:
    """Those of boxes with this limit of processes, by which a test knows its own."""
    found = []
    for parent in find_parents().directories:
        for path in parent.glob("parl-*"):
            with contextlib.suppress(OSError):  # another test's, gone meanwhile
                if (path / "pids.max").read_text().strip() == str(max_processes + 3):
                    found.append(path)
    return found


def test_a_simulator_sees_and_reaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network, no home, no environment of ours, no processes of the host, no capability; its own
    files are the only writable ones, and nothing of the box is left afterwards."""
    need(Level.A)
    monkeypatch.setenv("PARL_TEST_SECRET", "s3cr3t-value")
    private = tmp_path / "private"
    private.write_text("the host's")
    with socket_of_the_host() as port:
        seen, reached, *rest = calls(
            simulator(tmp_path, max_processes=201),
            ("look", {}),
            ("reach", {"port": port}),
            ("read", {"path": str(private)}),
            ("read", {"path": "/etc/passwd"}),
            ("read", {"path": "/etc/shadow"}),
            ("write", {"path": "/usr/here"}),
            ("write", {"path": "/here"}),
            ("write", {"path": "/tmp/here"}),
        )
    look = seen.value
    assert look["uids"] == [1000, 1000] and look["homes"] == [] and look["secret"] is None
    assert not {"home", "root", "work", "var", "sys"} & set(look["root"])
    assert look["processes"] <= 3 and look["init"].startswith("/usr/bin/bwrap --args 4 -- ")
    assert (look["caps"], look["seccomp"]) == ("0" * 16, "2")
    assert reached.text == "ConnectionRefusedError"
    assert [each.text for each in rest] == [
        *["FileNotFoundError"] * 3,
        *["Read-only file system"] * 2,
        "written",
    ]
    assert cgroups(201) == []


@contextlib.contextmanager
def socket_of_the_host() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_simulator_has_limits(tmp_path: Path) -> None:
    """Memory, processes and disk of one program are bounded; what it breaks is infrastructure, and
    the next call finds a failure, not another's state."""
    need(Level.A)
    config = simulator(tmp_path, memory_mib=128, max_processes=40, disk_mib=8)
    disk, forks, hog = calls(
        config,
        ("write", {"path": "/tmp/big", "mib": 64}),
        ("forks", {"count": 100}),
        ("hog", {"mib": 400}),
    )
    assert disk.text in ("No space left on device", "File too large")
    assert 5 < forks.value < 45
    assert (hog.error, hog.infra) == ("simulator_failed", True)


def test_a_simulators_answer_has_the_size_of_any(tmp_path: Path) -> None:
    """What an API may not answer, its stand-in may not either."""
    need(Level.A)
    config = simulator(tmp_path)
    config = config.model_copy(
        update={"limits": config.limits.model_copy(update={"max_body_bytes": 1000})}
    )
    small, large = calls(config, ("say", {"size": 900}), ("say", {"size": 1001}))
    assert small.error is None
    assert (large.error, large.infra) == ("response_too_large", False)


def test_a_simulator_that_lies_to_the_proxy(tmp_path: Path) -> None:
    """Lines that are no answers end the process; the call fails at once, typed."""
    need(Level.A)
    begin = time.perf_counter()
    (lied,) = calls(simulator(tmp_path), ("lie", {}))
    assert (lied.error, lied.infra) == ("simulator_failed", True)
    assert time.perf_counter() - begin < 15


def test_without_bubblewrap_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes with simulators do not open, MCP servers do not start, and the line says what to
    install; unsafe_local runs them on the host."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "rm", "setpriv"):
        (programs / name).symlink_to(shutil.which(name) or "/bin/true")
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(BackendUnavailable, match=r"install bubblewrap.*unsafe_local = true"):
        calls(simulator(tmp_path), ("look", {}))
    server = {"kind": "mcp", "mode": "live", "command": sys.executable, "args": ["-c", ""]}
    config = ProxyConfig.model_validate(
        {"state_dir": tmp_path / "s", "worlds": {"w": {"upstreams": {"x": server}}}}
    )
    with pytest.raises(McpFailed, match="install bubblewrap"):
        calls(config)
    (look,) = calls(simulator(tmp_path, unsafe_local=True), ("look", {}))
    assert look.value["uids"][0] == os.getuid() and "proc" in look.value["root"]
    assert "var" in look.value["root"]


LIGHT = """
import json, os, socket, sys
from pathlib import Path
def answer(name, arguments):
    if name == "look":
        return {"here": sorted(os.listdir(".")), "cwd": os.getcwd(),
                "parent": os.path.exists("../solution"),
                "key": os.environ.get("API_KEY"), "preload": os.environ.get("MARK"),
                "parl": [n for n in ("parl", "sandbox") if any((Path(p) / n / "task.py").exists()
                         for p in sys.path)]}
    if name == "reach":
        try:
            socket.create_connection(("127.0.0.1", arguments["port"]), 2).close()
            return "connected"
        except OSError as error:
            return type(error).__name__
    sys.stdout.write("x" * (64 << 20)); sys.stdout.flush()
tools = [{"name": n, "inputSchema": {"type": "object"}} for n in ("look", "reach", "flood")]
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method = message["method"]
    out = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        out["result"] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                         "serverInfo": {"name": "x", "version": "1"}}
    elif method == "tools/list":
        out["result"] = {"tools": tools}
    elif method == "tools/call":
        params = message["params"]
        text = json.dumps(answer(params["name"], params.get("arguments") or {}))
        out["result"] = {"content": [{"type": "text", "text": text}]}
    else:
        out["error"] = {"code": -32601, "message": "no"}
    print(json.dumps(out), flush=True)
"""


def server(folder: Path, **upstream: Any) -> ProxyConfig:
    """A server of a few lines in the folder of a task that also holds a solution."""
    tools = folder / "task" / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    (folder / "task" / "solution").mkdir(exist_ok=True)
    (tools / "light.py").write_text(LIGHT)
    declared = {
        "kind": "mcp",
        "mode": "live",
        "command": sys.executable,
        "args": ["light.py"],
        "cwd": str(tools),
        "env": {"MARK": "the author's"},
        **upstream,
    }
    secret = {"env": "PARL_TEST_SECRET", "bind": [
        {"host": Path(sys.executable).name, "place": "env", "name": "API_KEY"}]}  # fmt: skip
    return ProxyConfig.model_validate(
        {
            "state_dir": str(folder / "state"),
            "limits": {"max_body_bytes": 1 << 20},
            "boxes": {"max_processes": 202},
            "secrets": {"key": secret},
            "worlds": {"w": {"upstreams": {"light": declared}}},
        }
    )


def test_an_mcp_server_sees_its_folder_and_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a directory that is closed to other users, with a Python that may be; no network unless
    its declaration says so; the task's solution and PARL are not there."""
    need(Level.A)
    monkeypatch.setenv("PARL_TEST_SECRET", "s3cr3t-value-of-mine")
    tmp_path.chmod(0o700)
    with socket_of_the_host() as port:
        look, cut = calls(server(tmp_path), ("look", {}), ("reach", {"port": port}))
        (joined,) = calls(server(tmp_path, network=True), ("reach", {"port": port}))
    assert look.value == {
        "here": ["light.py"],
        "cwd": "/task",
        "parent": False,
        "key": "[secret]",
        "preload": "the author's",
        "parl": [],
    }
    assert cut.text == '"ConnectionRefusedError"' and joined.text == '"connected"'
    assert cgroups(202) == []


def test_the_authors_environment_stays_inside_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LD_PRELOAD of a task must not reach the processes that build the box, which run as we do; and
    no secret stands in a command line."""
    need(Level.A)
    boxes = Boxes(BoxesConfig())
    declared = McpUpstream(
        kind="mcp", command=sys.executable, env={"LD_PRELOAD": "/task/evil.so"}, cwd=tmp_path
    )
    start = boxes.server(declared, {"API_KEY": "s3cr3t-value-of-mine"})
    assert "LD_PRELOAD" not in start.env and start.env["API_KEY"] == "s3cr3t-value-of-mine"
    assert "s3cr3t" not in " ".join(start.argv)


def test_a_line_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB in one line against a cap of 1 MiB: the server is ended, the call fails typed."""
    need(Level.A)
    monkeypatch.setenv("PARL_TEST_SECRET", "s3cr3t-value-of-mine")
    (flood,) = calls(server(tmp_path), ("flood", {}))
    assert (flood.outcome, flood.infra) == ("unknown", True)


def test_network_is_for_boxes_only() -> None:
    """With a url there is no box whose network could be opened."""
    with pytest.raises(ValueError, match="over stdio"):
        McpUpstream(kind="mcp", url="https://x.example/mcp", network=True)


def test_what_a_program_needs_is_found(tmp_path: Path) -> None:
    """bin and lib of each installation on the way, never a whole prefix; a lone file is itself."""
    home = tmp_path / "home"
    for name in ("bin", "lib", "Documents"):
        (home / name).mkdir(parents=True)
    (home / "bin" / "python").write_bytes(b"\x7fELF")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib").mkdir()
    (venv / "bin" / "python").symlink_to(home / "bin" / "python")
    script = venv / "bin" / "server"
    script.write_text(f"#!{venv}/bin/python\n")
    found = installation_of(script)
    assert found == [venv / "bin", venv / "lib", home / "bin", home / "lib"]
    alone = tmp_path / "alone"
    alone.write_bytes(b"\x7fELF")
    assert installation_of(alone) == [alone]
    assert installation_of(Path("/usr/bin/env")) == []
    with pytest.raises(BackendUnavailable, match="No such file"):
        installation_of(tmp_path / "gone")


def test_the_view_hides_paths_of_the_host(tmp_path: Path) -> None:
    """The working directory has one name in every box."""
    arguments = program_files(View(directory=tmp_path), 1 << 20)
    place = arguments.index(str(tmp_path))
    assert arguments[place - 1 : place + 2] == ["--ro-bind", str(tmp_path), "/task"]
    assert arguments[-2:] == ["--remount-ro", "/"]


@pytest.mark.slow
def test_a_killed_proxy_leaves_no_box(tmp_path: Path) -> None:
    """kill -9 of the node's proxy with a simulator and a server running: their processes and
    cgroups are gone within seconds."""
    need(Level.A)
    sim = simulator(tmp_path).worlds["w"].upstreams["sim"].model_dump(mode="json")
    light = server(tmp_path).worlds["w"].upstreams["light"].model_dump(mode="json")
    light |= {"tools": {"look": {"name": "light_look"}}, "include": ["look"]}
    world = {"upstreams": {"sim": sim, "light": light}}
    boxes = {"max_processes": 203}
    node = {"state_dir": str(tmp_path / "n"), "boxes": boxes, "worlds": {"w": world}}
    (tmp_path / "node.json").write_text(json.dumps(node))
    script = tmp_path / "node.py"
    script.write_text(NODE)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "node.json")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    ours = cgroups(203)
    assert len(ours) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while any(path.exists() for path in ours):
        assert time.monotonic() < deadline, [path for path in ours if path.exists()]
        time.sleep(0.05)


NODE = """
import asyncio, json, sys
from pathlib import Path
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.proxy import ToolProxy

async def main():
    config = ProxyConfig.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    proxy = ToolProxy(config)
    await proxy.start()
    episode = await proxy.open_episode("e", "w")
    for tool in ("look", "light_look"):
        result = await proxy.call(episode.token, tool, {})
        assert result.error is None, result
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
