"""Episodes whose tools the proxy serves: what a failing API means for the reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from parl.rollout.episode import World, run_episode
from parl.rollout.waits import Waits
from parl.trajectory import Trajectory
from reward_models.episode import Outcome
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.task import load_task
from tests.parl.rollout.tiny import FAST, LineChat, Policy, TinyRuntime, make_job, script
from tests.sandbox.proxied_tasks import ANSWER, api_task, audit, config, operator
from tests.sandbox.proxy.api import ApiServer


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


def run(tmp_path: Path, api: ApiServer, policy: Policy) -> Trajectory:
    """One episode of the task against the live API, in a box of level A."""
    loaded = load_task(api_task(tmp_path / "task", api, mode="live"))
    settings = config(
        allow_live=True, proxy_file=operator(tmp_path, api), proxy_dir=tmp_path / "node"
    )

    async def go() -> Trajectory:
        pool = SandboxPool(loaded.bundle, size=1, leases=MemoryLeases(), config=settings)
        await pool.start()
        try:
            world = World(TinyRuntime(policy), pool.acquire, LineChat(), FAST, Waits("w0"))
            job = make_job(loaded.spec, max_turns=32, max_tokens=4000)
            return await run_episode(job, world)
        finally:
            await pool.close()

    return asyncio.run(go())


def test_a_storm_of_5xx_ends_an_episode_without_a_reward(tmp_path: Path, api: ApiServer) -> None:
    """Ten failures of the API in a row: infra_error, correctness None, every call on record."""
    turns = [f'?status {{"code": "{500 + number}"}}' for number in range(12)]
    trajectory = run(tmp_path, api, script(*turns))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.INFRA_ERROR, None)
    assert [call.error for call in trajectory.calls] == ["infra_error"] * 10
    assert trajectory.error and "upstream_5xx" in trajectory.error
    lines = audit(tmp_path / "node")
    assert len(lines) == 10 and all(line["infra"] for line in lines)


def test_an_episode_with_proxied_tools_is_recorded(tmp_path: Path, api: ApiServer) -> None:
    """Digests of its cassettes stand beside the limits, episode and weights in the audit log."""
    turns = ['?weather {"city": "Oslo"}', '?double {"number": 21}', ANSWER]
    trajectory = run(tmp_path, api, script(*turns))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.COMPLETED, 1.0)
    assert [json.loads(trajectory.calls[0].observation)["celsius"]] == [21]
    assert trajectory.sandbox is not None and len(trajectory.sandbox["cassettes"]) == 1
    (line,) = audit(tmp_path / "node")
    assert (line["episode"], line["policy_version"]) == (trajectory.episode_id, 0)
