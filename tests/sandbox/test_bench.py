"""The benches run, and their ratios hold on a loaded machine."""

import asyncio
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from sandbox.backends.base import Level
from sandbox.bench import bars, kill_leaks, kill_left, kill_task, kill_victim, many_waits, starts
from sandbox.bench.load import measured_load
from sandbox.bench.warm_call import measure
from sandbox.config import SandboxConfig
from tests.sandbox.conftest import DOCKER, best_level, need


def test_a_warm_call_is_much_cheaper_than_a_process():
    """In one run on a loaded machine; the p50 bar of 2 ms is for an idle one."""
    config = SandboxConfig(level=best_level().value, unsafe_local=True)  # type: ignore[arg-type]
    report = asyncio.run(measure(config, num_calls=100, num_processes=10))
    assert report.ratio > 5
    assert report.call.p50 < 10


@pytest.mark.parametrize("level", [Level.A, DOCKER])
def test_starts_and_calls_are_measured(level: Level):
    """Every part has a sample per box; a warm call beats a process per call."""
    timings = asyncio.run(starts.measure_level(need(level), num_boxes=2))
    assert [len(timing.samples) for timing in timings.values()] == [2, 100, 2, 2]
    assert timings["warm call"].p50 < starts.measure_process(5).p50
    if level is not Level.DOCKER:
        assert asyncio.run(starts.measure_cpu(need(level), 2)) > 0


@pytest.mark.docker
def test_docker_exec_is_the_slower_peer():
    """An exec is a process start through two daemons."""
    need(Level.DOCKER)
    cycle, run = starts.measure_docker_peer(1)
    ours = asyncio.run(starts.measure_level(need(Level.DOCKER), num_boxes=1))
    assert run.p50 > 5 * ours["warm call"].p50 and cycle.p50 > run.p50


def test_waiting_episodes_cost_the_driver_little():
    """None is lost, and a box's wait is cheaper than a process's."""
    config = SandboxConfig(level=best_level().value, unsafe_local=True)  # type: ignore[arg-type]
    report = asyncio.run(many_waits.run(config, count=8, num_calls=3, tool_s=0.2))
    assert (report.waits.num_calls, report.waits.num_lost) == (24, 0)
    assert "8 episodes x 3 calls" in report.lines()[2] and " 0 lost" in report.lines()[2]


def test_the_load_beside_a_figure():
    """A busy loop is seen, as ours and as the machine's."""
    with measured_load() as load:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
    assert 0 < load.own_cpus <= 1.05 * load.busy_cpus + 0.1
    assert load.own_cpus * load.wall_s == pytest.approx(0.5, abs=0.1)


def test_bars_are_judged_and_lost_episodes_too():
    """A figure at its limit misses it."""
    assert bars.Bar("a", 1.9, 2.0, "ms").ok and not bars.Bar("a", 2.0, 2.0, "ms").ok
    part = bars.Part([bars.Bar("a", 1.9, 2.0, "ms", "peer 3 x")])
    assert part.ok and "1.90 ms < 2: ok (peer 3 x)" in part.lines()[0]
    part.lost = 1
    assert not part.ok


KILLS = [
    *[pytest.param(Level.A, victims, id="+".join(victims)) for victims in kill_leaks.VICTIMS],
    pytest.param(Level.B, ("driver",), id="B-driver"),
    pytest.param(Level.DOCKER, ("driver",), id="docker-driver", marks=pytest.mark.docker),
    pytest.param(Level.DOCKER, ("worker", "proxy"), id="docker-two", marks=pytest.mark.docker),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("level", "victims"), KILLS)
def test_the_killed_leave_nothing(level: Level, victims: tuple[str, ...]):
    """One kill each; ``python -m sandbox.bench.kill_leaks --times 20`` does more of them. No
    episode is judged wrong, and what a survivor plays without a proxy has no verdict."""
    need(level)
    kill = kill_leaks.Kill(level, victims, early=False, after_s=0.5)
    with kill_leaks.round_folder() as folder:
        killed = kill_leaks.kill_once(kill, folder)
    assert killed.ok, kill_leaks.line_of(kill, killed)
    assert killed.num_boxes >= 2 and killed.num_right >= 2
    if victims in [("proxy",), ("worker", "proxy")]:
        assert killed.num_null_after > 0


def test_kills_are_drawn_alike_and_hit_everybody():
    """The same seed, the same moments; twenty hit each kind of victim at each level."""
    kills = kill_leaks.draw_kills(20, [Level.A, Level.DOCKER], seed=1)
    assert kills == kill_leaks.draw_kills(20, [Level.A, Level.DOCKER], seed=1)
    hit = {(kill.level, kill.victims) for kill in kills}
    assert hit == {(level, v) for level in (Level.A, Level.DOCKER) for v in kill_leaks.VICTIMS}


def test_what_is_left_is_seen(tmp_path: Path):
    """A process by its folder, one by its mark, a file of a dead owner that the proxy keeps."""
    for role in kill_leaks.ROLES:
        kill_victim.temporary(tmp_path, role).mkdir()
    state = kill_victim.temporary(tmp_path, "proxy") / "guard" / f"x{kill_task.STATE_FILE}worker"
    state.parent.mkdir()
    state.touch()
    environments = [
        {"TMPDIR": str(kill_victim.temporary(tmp_path, "driver") / "below")},
        {kill_task.ROLE_VARIABLE: kill_task.mark_of(tmp_path, "worker")},
    ]
    running = [subprocess.Popen(["sleep", "60"], env=variables) for variables in environments]
    try:
        look = partial(kill_left.left_of, tmp_path, tree=kill_left.Tree(), footprints=[])
        assert not look(["proxy"]).processes and look(["proxy"]).counts["directories"] == 1
        assert look(["driver"]).processes == [f"{running[0].pid} sleep 60 "]
        assert not look(["driver"]).directories
        assert look(["worker"]).processes == [f"{running[1].pid} sleep 60 "]
        assert look(["worker"]).directories == [str(state)]
        tree = kill_left.Tree()
        tree.add(os.getpid())
        left = kill_left.left_of(tmp_path, [], tree, [])
        assert {f"{process.pid} sleep 60 " for process in running} <= set(left.processes)
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert not look(["driver"]).processes
