"""The pool: warm boxes, leases before processes, discarded boxes, and the reaper."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.db.engine import open_ledger
from infra.leases import LeaseBook, process_owner
from sandbox.backends.base import Level
from sandbox.backends.processes import marked_processes
from sandbox.catalog.lookup_calc.family import LookupCalc
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxError, SandboxLost, TaskError
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool, config_for
from sandbox.reaper import process_host, reap_box, reap_lease
from sandbox.session import RawCall, Stop
from sandbox.shelf import LEASE_KIND
from sandbox.task import ToolBundle
from sandbox.tool_session import ToolSession
from tests.sandbox.conftest import LEVELS, need

FAMILY = LookupCalc()


def spec_of(index: int, task_type: str = "lookup") -> Any:
    """An instance whose sizes are the pool's defaults."""
    return FAMILY.instance(0, index, "train", task_type)


def pool_of(size: int = 1, level: Level = Level.B, leases: Any = None) -> SandboxPool:
    """A pool of the shipped family; skips where the level does not exist."""
    need(level)
    config = SandboxConfig(level=level.value, unsafe_local=True, disk_mib=16)
    return SandboxPool(
        FAMILY.bundle, size=size, leases=MemoryLeases() if leases is None else leases, config=config
    )


async def solve(session: ToolSession) -> float | None:
    """Play the oracle."""
    oracle = FAMILY.oracle(session.spec)
    await session.start()
    for calls in oracle.rounds:
        for call in calls:
            assert (await session.call(call)).error is None
    verdict = await session.verify(oracle.final_text)
    await session.close()
    return verdict.correctness


@pytest.mark.parametrize("level", LEVELS)
def test_many_episodes_share_few_boxes(level: Level):
    """Twelve episodes at once on three boxes: all solved, three boxes opened."""

    async def go() -> None:
        pool = pool_of(3, level)
        await pool.start()

        async def episode(index: int) -> float | None:
            return await solve(await pool.acquire(spec_of(index, ("lookup", "add")[index % 2])))

        try:
            assert await asyncio.gather(*map(episode, range(12))) == [1.0] * 12
            assert (pool.stats.opened, pool.stats.lent) == (3, 12)
            assert (pool.stats.dirty, pool.stats.lost) == (0, 0)
            assert pool.level is level
        finally:
            await pool.close()

    asyncio.run(go())


@pytest.mark.parametrize("level", LEVELS)
def test_an_episode_cannot_see_a_former_ones_data(level: Level):
    """Same box, next task: the store holds exactly the new task's keys."""

    async def go() -> None:
        pool = pool_of(1, level)
        await pool.start()
        first, second = spec_of(1), spec_of(2)
        old, new = (spec.environment.data["store"] for spec in (first, second))
        gone = next(key for key in old if key not in new)
        try:
            assert await solve(await pool.acquire(first)) == 1.0
            session = await pool.acquire(second)
            await session.start()
            observation = await session.call(RawCall("lookup", f'{{"key":"{gone}"}}'))
            assert observation.text == "tool_error: no such key"
            state = await session._request("end_state", {}, 5)
            assert state.value == {"store": new}
            await session.close()
            assert pool.stats.opened == 1
        finally:
            await pool.close()

    asyncio.run(go())


def test_the_answer_never_enters_the_episodes_box():
    """The verifier's data goes to another process, which no episode ever was in."""

    async def go() -> None:
        pool = pool_of()
        spec = spec_of(3)
        marked = replace(spec, verifier=replace(spec.verifier, data={"answer": 1, "store": {}}))
        await pool.start()
        try:
            session = await pool.acquire(marked)
            await session.start()
            verdict = await session.verify("1")
            assert verdict.correctness == 0.0 and verdict.reasons == ("the store was changed",)
            await session.close()
            assert pool._verifiers.stats.lent == 1 and pool.stats.lent == 1
        finally:
            await pool.close()

    asyncio.run(go())


def test_a_dead_box_is_replaced_and_its_episode_hears_of_it():
    """SandboxLost for the episode, a new box for the next."""

    async def go() -> None:
        leases = MemoryLeases()
        pool = pool_of(leases=leases)
        await pool.start()
        try:
            session = await pool.acquire(spec_of(1))
            await session.start()
            box_id, pid = session._box.box_id, session._box.pid
            os.kill(pid or 0, signal.SIGKILL)
            while marked_processes(box_id):  # on a busy machine its children may answer first
                await asyncio.sleep(0.01)
            with pytest.raises(SandboxLost):
                await session.call(RawCall("lookup", '{"key":"a"}'))
            await session.close()
            assert pool.stats.lost == 1
            assert await solve(await pool.acquire(spec_of(2))) == 1.0
            assert pool.stats.opened == 2 and len(leases.held) == 2  # one box, one verifier
        finally:
            await pool.close()
        assert not leases.held

    asyncio.run(go())


def test_a_dirty_box_is_thrown_away():
    """When the reset does not restore the state at birth, the box does not serve again."""

    async def go() -> None:
        pool = pool_of()
        await pool.start()
        try:
            session = await pool.acquire(spec_of(1))
            await session.start()
            agent = int(
                Path(f"/proc/{session._box.pid}/task/{session._box.pid}/children").read_text()
            )
            os.sched_setscheduler(agent, os.SCHED_BATCH, os.sched_param(0))
            await session.close()
            assert pool.stats.dirty == 1
            assert await solve(await pool.acquire(spec_of(2))) == 1.0
            assert pool.stats.opened == 2
        finally:
            await pool.close()

    if os.geteuid() != 0:
        pytest.skip("soiling another uid's process from outside needs root")
    asyncio.run(go())


def test_the_lease_is_written_before_the_process_and_completed_after():
    """First row without a pid and with what will exist; then the pid; gone after the end."""

    class Recording(MemoryLeases):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, Any]] = []

        def acquire(self, kind: str, ref: str, ttl_s: float, data: dict[str, Any]) -> Any:
            self.rows.append({"running": bool(marked_processes(ref)), **data})
            return super().acquire(kind, ref, ttl_s, data)

    async def go() -> None:
        leases = Recording()
        pool = pool_of(leases=leases)
        session = await pool.acquire(spec_of(0), owner="episode-7")
        first, second = leases.rows
        assert (first["process"], first["running"], first["owner"]) == (None, False, "episode-7")
        assert second["running"] and second["process"].split(":")[1] == str(session._box.pid)
        await session.close()
        await pool.close()
        assert not leases.held

    asyncio.run(go())


def test_a_full_pool_says_so():
    """No box in time is an error that names the size; a closed pool lends nothing."""

    async def go() -> None:
        pool = pool_of()
        session = await pool.acquire(spec_of(0))
        with pytest.raises(SandboxError, match=r"within 0\.05 s: all 1 are in use"):
            await pool.acquire(spec_of(1), timeout_s=0.05)
        await session.close()
        await pool.close()
        with pytest.raises(SandboxError, match="closed"):
            await pool.acquire(spec_of(1))

    asyncio.run(go())


def test_closing_a_pool_loses_running_sessions():
    """Their next request says SandboxLost, and closing them is still fine."""

    async def go() -> None:
        pool = pool_of()
        session = await pool.acquire(spec_of(0))
        await session.start()
        await pool.close()
        with pytest.raises(SandboxLost):
            await session.verify("1")
        await session.close()

    asyncio.run(go())


def test_close_goes_on_when_its_caller_is_cancelled():
    """The box comes back to the pool all the same."""

    async def go() -> None:
        pool = pool_of()
        session = await pool.acquire(spec_of(0))
        await session.start()
        closing = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await session.close()
        assert await solve(await pool.acquire(spec_of(1), timeout_s=5)) == 1.0
        assert pool.stats.opened == 1
        await pool.close()

    asyncio.run(go())


def test_violations_stop_sessions_in_real_boxes_too():
    """The state machine does not depend on the box."""

    async def go() -> Stop | None:
        pool = pool_of()
        session = await pool.acquire(spec_of(0))
        await session.start()
        observation = None
        for _ in range(5):
            observation = await session.call(RawCall("calc", '{"expression":"1+1"}'))
        await session.close()
        await pool.close()
        return observation.stop if observation else None

    assert asyncio.run(go()) is Stop.LOOP


def test_foreign_and_oversized_tasks_are_refused():
    """Other code, other sizes, or untrusted code without isolation."""

    async def go() -> None:
        pool = pool_of()
        with pytest.raises(TaskError, match="this pool runs"):
            await pool.acquire(replace(spec_of(0), bundle="0" * 64))
        spec = spec_of(0)
        large = replace(spec, environment=replace(spec.environment, memory_mib=512))
        with pytest.raises(TaskError, match="the boxes have memory_mib=256"):
            await pool.acquire(large)
        assert config_for(large, pool.config).memory_mib == 512
        await pool.close()

    asyncio.run(go())
    config = SandboxConfig(level="C", unsafe_local=True)
    need(Level.C)
    with pytest.raises(BackendUnavailable, match="not trusted and level C isolates nothing"):
        SandboxPool(ToolBundle("x", "", ""), size=1, leases=MemoryLeases(), config=config)


OWNER = textwrap.dedent(
    """
    import asyncio, sys
    sys.path[:0] = sys.argv[1:2]
    from infra.db.engine import open_ledger
    from infra.leases import LeaseBook
    from tests.sandbox.test_pool import pool_of, spec_of
    from sandbox.backends.base import Level

    async def go():
        book = LeaseBook(open_ledger(sys.argv[3]))
        pool = pool_of(2, Level(sys.argv[2]), book)
        await pool.start()
        session = await pool.acquire(spec_of(0), owner="episode")
        await session.start()
        print(" ".join(row.ref for row in book.held()), flush=True)
        await asyncio.sleep(60)

    asyncio.run(go())
    """
)


@pytest.mark.parametrize("level", LEVELS)
def test_the_reaper_removes_what_a_killed_owner_left(level: Level, tmp_path: Path):
    """Through the real ledger: rows of a dead owner, their processes, cgroups and directories."""
    need(level)
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = open_ledger(url)
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, root, level.value, url], stdout=subprocess.PIPE, cwd=root
    )
    assert owner.stdout is not None
    boxes = owner.stdout.readline().decode().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert len(boxes) == 3
    book = LeaseBook(ledger)
    expired = book.expired()
    left = [Path(p) for row in expired for kind in ("cgroups", "directories")
            for p in row.data_json[kind]]  # fmt: skip
    assert {row.ref for row in expired} == set(boxes)
    assert bool(left) == (level in (Level.A, Level.C))
    report = book.reap({LEASE_KIND: reap_lease})
    assert len(report.removed) == 3 and not report.failed
    assert not any(path.exists() for path in left)
    assert not any(marked_processes(box) for box in boxes)
    assert not book.expired()
    ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_of_a_killed_owner_even_without_a_reaper(level: Level, tmp_path: Path):
    """Its guardian removes processes, cgroups, directories and containers within seconds; the
    leases stay, for a reaper to find nothing more to do."""
    need(level)
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = open_ledger(url)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", OWNER, root, level.value, url]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
    assert owner.stdout is not None
    boxes = owner.stdout.readline().decode().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    footprints = [need(level).footprint(box) for box in boxes]
    paths = [Path(p) for f in footprints for k in ("cgroups", "directories") for p in f[k]]
    deadline = time.monotonic() + 10
    while left := [p for p in paths if p.exists()] + [
        p for b in boxes for p in marked_processes(b)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert {row.ref for row in LeaseBook(ledger).expired()} == set(boxes)
    ledger.close()


def test_the_reaper_finds_a_box_whose_pid_was_never_written():
    """The owner died between the start and the second write: the marker names the processes."""
    box_id = secrets.token_hex(8)
    process = subprocess.Popen(["sleep", "60"], env={"PARL_BOX": box_id, "PATH": "/usr/bin:/bin"})
    data = {"box_id": box_id, "process": None, "cgroups": [], "directories": []}
    host = process_host()
    deadline = time.monotonic() + 2
    while not marked_processes(box_id) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(SandboxError, match="lives on elsewhere"):
        reap_box({**data, "host": "elsewhere"})
    assert process.poll() is None
    reap_box({**data, "host": host})
    assert process.wait(timeout=2) == -signal.SIGKILL
    reap_box({**data, "host": host})


def test_a_reused_pid_is_not_killed():
    """The recorded start time must match."""
    process = subprocess.Popen(["sleep", "60"])
    host, pid, start = process_owner(process.pid).rsplit(":", 2)
    data = {
        "box_id": secrets.token_hex(8),
        "host": host,
        "process": f"{host}:{pid}:{int(start) - 1}",
        "cgroups": [],
        "directories": [],
    }
    reap_box(data)
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_pool_that_cannot_warm_leaves_nothing():
    """Code that does not load: the error, no box, no lease."""
    need(Level.B)
    leases = MemoryLeases()
    broken = ToolBundle("broken", "import nonsense", "")
    pool = SandboxPool(broken, size=2, leases=leases, config=SandboxConfig(level="B"))
    with pytest.raises(TaskError, match="nonsense"):
        asyncio.run(pool.start())
    assert not leases.held


def test_a_lease_that_cannot_be_written_stops_the_box():
    """No row, no process; no pid in the row, no process either."""

    class Failing(MemoryLeases):
        def acquire(self, kind: str, ref: str, ttl_s: float, data: dict[str, Any]) -> Any:
            if data["process"] is not None:
                raise OSError("disk full")
            started.append(ref)
            return super().acquire(kind, ref, ttl_s, data)

    started: list[str] = []
    leases = Failing()
    pool = pool_of(leases=leases)
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(pool.acquire(spec_of(0)))
    assert len(started) == 1 and not leases.held and not marked_processes(started[0])
