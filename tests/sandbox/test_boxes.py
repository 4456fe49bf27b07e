"""One contract for every backend: answers, deadlines, death, reset, and nothing left behind."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sandbox.backends.base import Level, PooledBox
from sandbox.backends.choice import choose_backend, open_backend, probe
from sandbox.backends.docker_engine import connected
from sandbox.backends.enforced import KEYS
from sandbox.backends.processes import marked_processes
from sandbox.backends.program import BoxProgram
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxLost, TaskError
from sandbox.reaper import process_host, reap_box
from tests.sandbox.conftest import BOXED, CONFIG, LEVELS, RunInBox, host_pids, need

SOURCE = """
import os, time, subprocess
from sandbox.toolkit import ToolError, tool, workdir
counter = 0

def setup(data):
    (workdir() / "data.txt").write_text(data["text"])

@tool
def read(name: str) -> str:
    return (workdir() / name).read_text()

@tool
def count() -> str:
    global counter
    counter += 1
    return str(counter)

@tool
def refuse() -> str:
    raise ToolError("not today")

@tool
def crash() -> str:
    raise ValueError("secret detail")

@tool
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"

@tool
def die() -> str:
    os._exit(3)

@tool
def kill_agent() -> str:
    os.kill(os.getppid(), 9)
    os.kill(os.getppid(), 19)
    return "shot"

@tool
def big(size: int) -> str:
    return "x" * size

@tool
def soil() -> str:
    (workdir() / "left").mkdir()
    (workdir() / "left" / "file").write_text("old episode")
    os.chmod(workdir() / "left", 0)
    os.chmod(workdir(), 0o777)
    subprocess.Popen(["/usr/bin/setsid", "/usr/bin/sleep", "600"])
    return "soiled"

@tool
def forge() -> str:
    global end_state
    end_state = lambda: {"files": ["forged"]}
    return "forged"

def end_state():
    mine = [p for p in os.listdir("/proc") if p.isdigit()]
    mine = [p for p in mine if os.stat("/proc/" + p).st_uid == os.getuid()]
    others = [p for p in mine if "sleep" in open(f"/proc/{p}/cmdline").read()]
    return {"files": sorted(os.listdir(workdir())), "others": len(others)}
"""


async def call(box: PooledBox, tool: str, timeout_s: float = 5.0, **arguments: object) -> tuple:
    """(value, error) of one call."""
    reply = await box.request(
        "call",
        {
            "tool": tool,
            "arguments": arguments,
            "max_output_bytes": 1000,
            "timeout_s": timeout_s,
        },
        timeout_s + 5,
    )
    return reply.value, reply.error


async def start(box: PooledBox, text: str = "hello") -> None:
    """Set the world up."""
    reply = await box.request("start", {"data": {"text": text}, "timeout_s": 5}, 10)
    assert reply.error is None


@pytest.mark.parametrize("level", LEVELS)
def test_calls_answer_refuse_crash_and_time_out(level: Level, in_box: RunInBox):
    """Every way a call can end, and the world's files survive a killed worker."""

    async def body(box: PooledBox) -> None:
        assert (await call(box, "count"))[1] == "crash"  # no worker before start
        await start(box)
        assert await call(box, "read", name="data.txt") == ("hello", None)
        assert await call(box, "refuse") == ("not today", "tool_error")
        assert await call(box, "crash") == ("ValueError", "crash")
        assert await call(box, "nothing") == ("nothing is not a tool of this task", "tool_error")
        assert await call(box, "sleep", timeout_s=0.1, seconds=9) == ("call", "timeout")
        assert await call(box, "die") == ("call", "died")
        assert await call(box, "read", name="data.txt") == ("hello", None)
        text, error = await call(box, "big", size=5_000_000)
        assert error is None and len(text) == 1000 and text.endswith("[cut: 5000000 bytes]")
        state = await box.request("end_state", {"timeout_s": 5}, 10)
        assert state.value["files"] == ["data.txt"]

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_reset_leaves_no_files_processes_or_python_state(level: Level, in_box: RunInBox):
    """After an episode that tried to stay, the box is as at birth."""

    async def body(box: PooledBox) -> None:
        await start(box, "first")
        assert await call(box, "count") == ("1", None)
        assert await call(box, "count") == ("2", None)
        assert await call(box, "soil") == ("soiled", None)
        assert await box.reset()
        await start(box, "second")
        assert await call(box, "count") == ("1", None)
        assert await call(box, "read", name="data.txt") == ("second", None)
        assert await call(box, "read", name="left/file") == ("FileNotFoundError", "crash")

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("whom", ["outermost", "agent"])
def test_a_killed_box_is_lost_and_leaves_nothing(level: Level, whom: str, in_box: RunInBox):
    """SIGKILL from the host: SandboxLost, and no process with its marker survives."""

    async def body(box: PooledBox) -> None:
        await start(box)
        os.kill(host_pids(box)[whom], signal.SIGKILL)
        with pytest.raises(SandboxLost, match=box.box_id):
            for _ in range(500):  # the agent hears of its parent's death a moment later
                await call(box, "count")
                await asyncio.sleep(0.02)
        assert not box.alive
        deadline = time.monotonic() + 10  # a killed bwrap's child is reaped by the machine's init
        while marked_processes(box.box_id) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not marked_processes(box.box_id)
        with pytest.raises(SandboxLost, match="after its end"):
            await call(box, "count")

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", BOXED)
def test_a_tool_cannot_kill_the_agent(level: Level, in_box: RunInBox):
    """The agent is the init of its pid namespace: SIGKILL from inside does nothing."""

    async def body(box: PooledBox) -> None:
        await start(box)
        assert await call(box, "kill_agent") == ("shot", None)
        assert await call(box, "count") == ("1", None)

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_a_missed_deadline_kills_the_box(level: Level, in_box: RunInBox):
    """When the agent itself does not answer, the host does not wait."""

    async def body(box: PooledBox) -> None:
        await start(box)
        begin = time.monotonic()
        params = {"tool": "sleep", "arguments": {"seconds": 60}, "max_output_bytes": 9}
        with pytest.raises(SandboxLost, match=r"not answered within 0\.2 s"):
            await box.request("call", {**params, "timeout_s": 60}, 0.2)
        assert time.monotonic() - begin < 3 and not marked_processes(box.box_id)

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_a_cancelled_request_kills_the_box(level: Level, in_box: RunInBox):
    """Its reply would answer the next request, and nobody waits for what still runs."""

    async def body(box: PooledBox) -> None:
        await start(box)
        task = asyncio.ensure_future(call(box, "sleep", seconds=60, timeout_s=60))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not box.alive and not marked_processes(box.box_id)

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_a_box_works_in_another_event_loop(level: Level):
    """Opened in one loop, used and killed in others."""
    backend = need(level)
    box = asyncio.run(backend.open(secrets.token_hex(8), BoxProgram("tools.py", SOURCE)))
    asyncio.run(start(box))
    assert asyncio.run(call(box, "count")) == ("1", None)
    asyncio.run(box.kill())
    asyncio.run(asyncio.sleep(0))
    assert not marked_processes(box.box_id)


@pytest.mark.parametrize("level", LEVELS)
def test_broken_code_says_why(level: Level):
    """A tools.py that does not even load is the author's error, and leaves no box behind."""

    async def go() -> None:
        await need(level).open("broken0" + level.value, BoxProgram("tools.py", "import nonsense"))

    with pytest.raises(TaskError, match=r"tools\.py does not load: .*nonsense"):
        asyncio.run(go())
    assert not marked_processes("broken0" + level.value)


@pytest.mark.parametrize("level", LEVELS)
def test_an_agent_that_dies_early_is_lost(level: Level):
    """No digest, no box."""
    need(level)

    async def go() -> None:
        backend = open_backend(level, CONFIG)
        program = BoxProgram("tools.py", "import os; os._exit(9)")
        await backend.open("early0" + level.value, program)

    with pytest.raises(SandboxLost, match="did not start"):
        asyncio.run(go())
    assert not marked_processes("early0" + level.value)


@pytest.mark.parametrize("level", LEVELS)
def test_no_process_survives_a_killed_owner(level: Level):
    """SIGKILL of the process that owns two busy boxes ends every process of theirs within 2 s."""
    need(level)
    ids = [secrets.token_hex(8) for _ in range(2)]
    program = textwrap.dedent(
        """
        import asyncio, sys
        sys.path[:0] = sys.argv[1:2]
        from tests.sandbox.test_boxes import SOURCE, call, start
        from tests.sandbox.conftest import need
        from sandbox.backends.base import Level
        from sandbox.backends.program import BoxProgram

        async def go():
            backend = need(Level(sys.argv[2]))
            boxes = [await backend.open(i, BoxProgram("tools.py", SOURCE)) for i in sys.argv[3:]]
            for box in boxes:
                await start(box)
                await call(box, "soil")
            print("ready", flush=True)
            await asyncio.gather(*(call(b, "sleep", seconds=60, timeout_s=60) for b in boxes))

        asyncio.run(go())
        """
    )
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", program, root, level.value, *ids], stdout=subprocess.PIPE, cwd=root
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    try:
        assert all(marked_processes(box_id) for box_id in ids)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 10
    while (left := [p for i in ids for p in marked_processes(i)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left or level is Level.C  # which promises no more than its process group
    footprints = [need(level).footprint(box_id) for box_id in ids]
    for box_id, footprint in zip(ids, footprints, strict=True):
        reap_box({"box_id": box_id, "host": process_host(), "process": None, **footprint})
    assert not any(Path(p).exists() for f in footprints for paths in f.values() for p in paths)
    if level is Level.DOCKER:
        with connected() as client:
            assert not client.api.containers(
                all=True, filters={"name": [*footprints[0]["containers"]]}
            )
    assert not any(marked_processes(box_id) for box_id in ids)


def test_level_c_needs_permission():
    """No isolation is never the default."""
    with pytest.raises(BackendUnavailable, match="unsafe_local = true"):
        open_backend(Level.C, SandboxConfig())
    with pytest.raises(BackendUnavailable, match="unsafe_local = true"):
        choose_backend(SandboxConfig(level="C"))


def test_probe_says_each_level_and_why():
    """One line for `parl doctor`; and the best level is chosen."""
    reports = probe(CONFIG)
    levels = [Level.A, Level.B, Level.C, Level.DOCKER, Level.GVISOR]
    assert [report.level for report in reports] == levels
    assert all(report.reason and "\n" not in report.reason for report in reports)
    best = next(report.level for report in reports if report.available)
    assert choose_backend(CONFIG).level is best


def test_a_missing_bwrap_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What to install; and auto does not fall back to no isolation."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable) as caught:
        choose_backend(SandboxConfig())
    assert "bwrap is not installed: apt-get install bubblewrap" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("level", LEVELS)
def test_a_box_records_the_limits_that_hold(level: Level, in_box: RunInBox):
    """One shape for every level; None says that a limit does not exist there."""

    async def body(box: PooledBox) -> None:
        record = box.enforced
        assert tuple(record) == KEYS and record["level"] == level.value
        assert record["memory_bytes"] == CONFIG.memory_mib << 20 and record["core_bytes"] == 0
        whole = level in (Level.A, Level.DOCKER)
        assert record["memory_scope"] == ("box" if whole else "process")
        assert (record["cpus"], record["swap_bytes"]) == (
            (CONFIG.cpus, 0) if whole else (None, None)
        )
        isolated = level is not Level.C
        assert record["network"] == ("none" if isolated else None)
        assert record["max_processes"] == (CONFIG.max_processes if isolated else None)
        assert record["uid"] != 0 and json.loads(json.dumps(record)) == record

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_what_judges_runs_alone_and_in_a_clean_process(level: Level, in_box: RunInBox):
    """``end_state``: no process of the episode is left, and what a tool did to Python is undone."""

    async def body(box: PooledBox) -> None:
        await start(box)
        assert await call(box, "soil") == ("soiled", None)
        assert await call(box, "forge") == ("forged", None)
        state = await box.request("end_state", {"timeout_s": 5}, 10)
        assert "forged" not in state.value["files"] and "data.txt" in state.value["files"]
        assert (await box.request("end_state", {"timeout_s": 5}, 10)).value["others"] == 0

    in_box(level, SOURCE, body)
