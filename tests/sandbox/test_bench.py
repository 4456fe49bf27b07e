"""The benches run, and their ratios hold on a loaded machine."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from sandbox.backends.base import Level
from sandbox.bench import kill_leaks, many_waits, starts
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
    lines = asyncio.run(many_waits.run(config, count=8, num_calls=3, tool_s=0.2))
    assert "8 episodes x 3 calls" in lines[2] and " 0 lost" in lines[2]


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.A, Level.B, DOCKER])
@pytest.mark.parametrize("victim", kill_leaks.VICTIMS)
def test_a_killed_owner_leaves_nothing(level: Level, victim: str):
    """One kill each; ``python -m sandbox.bench.kill_leaks --times 20`` does more of them."""
    need(level)
    with tempfile.TemporaryDirectory() as directory:
        left, count, _ = kill_leaks.kill_once(level, victim, False, 0.5, Path(directory))
    assert not any(left.counts.values()), left
    assert count >= 2
