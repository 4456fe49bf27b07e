"""Episodes from worker to reward, in a world whose parts are real and can be broken."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from engine.runtime.protocol import ModelRuntime
from infra.db.engine import open_ledger
from infra.db.models import EpisodeRow
from infra.metrics import METRICS_FILE, Metrics
from parl.report.watchers import MetricsWatcher
from parl.rollout.jobs import group_jobs
from parl.rollout.worker import RolloutWorker
from parl.store import Store
from reward_models.config import RewardConfig
from reward_models.episode import Outcome
from reward_models.stages import RewardModel
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.task import EnvironmentSpec, TaskSpec, ToolBundle
from sandbox.tool_schema import tools_from_source
from sandbox.tool_session import ToolSession
from tests.parl.rollout.tiny import FAST, LineChat, Policy, TinyRuntime, lookup_task, make_job

TOOLS = '''
import time
from sandbox.toolkit import tool, workdir

@tool
def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"

@tool(effect="write")
def fill(name: str) -> str:
    """Write 64 MiB."""
    with (workdir() / name).open("wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    return "written"
'''
VERIFY = """
def verify(final_text, end_state, data):
    return {"correctness": float(final_text.split() in (["done"], ["done", "really"]))}
"""
BUNDLE = ToolBundle("infra-tests", TOOLS, VERIFY)

Break = Callable[[ToolSession], None]
"""Called with each new session, before its first turn."""


def plain_task() -> TaskSpec:
    """Tools in the box alone; the right answer is "done"."""
    return replace(
        lookup_task(),
        bundle=BUNDLE.hash,
        tools=tools_from_source(TOOLS),
        forbidden_tools=(),
        environment=EnvironmentSpec(),
    )


@dataclass(frozen=True)
class Played:
    """What a run's ledger and metrics say; ``rewards`` as the ledger has them after scoring."""

    outcomes: list[Outcome]
    correctness: list[float | None]
    rewards: list[float | None]
    errors: list[str | None]
    failures: dict[str, int]
    metrics: dict[str, float]
    attempts: int


@contextmanager
def store_at(folder: Path) -> Iterator[Store]:
    """A run with one open round."""
    ledger = open_ledger(f"sqlite:///{folder}/ledger.db")
    store = Store(ledger, "run-1")
    store.create_run(name="run", kind="rl", seed=3, config={})
    store.begin_round("train", 0, stage=0, weight_version_in=0)
    yield store
    ledger.close()


def play(
    folder: Path,
    policy: Policy | ModelRuntime,
    *,
    task: TaskSpec | None = None,
    bundle: ToolBundle = BUNDLE,
    config: SandboxConfig,
    broken: Break | None = None,
    num_episodes: int = 1,
    limits: dict[str, Any] | None = None,
) -> Played:
    """Run episodes through a worker into a ledger, score and count them."""
    with store_at(folder) as store:
        run(store, policy, task, bundle, config, broken, num_episodes, limits or {})
        return judged(store, folder)


def run(
    store: Store,
    policy: Policy | ModelRuntime,
    task: TaskSpec | None,
    bundle: ToolBundle,
    config: SandboxConfig,
    broken: Break | None = None,
    num_episodes: int = 1,
    limits: dict[str, Any] | None = None,
) -> None:
    """The worker's part; LedgerError when the ledger cannot be written."""
    pool = SandboxPool(bundle, size=num_episodes, leases=MemoryLeases(), config=config)

    async def open_session(spec: TaskSpec, owner: str = "", **options: Any) -> ToolSession:
        session = await pool.acquire(spec, owner, **options)
        if broken is not None:
            broken(session)
        return session

    job = {"max_turns": 32, "max_tokens": 4000, **(limits or {})}
    jobs = [make_job(task or plain_task(), number, **job) for number in range(num_episodes)]
    worker = RolloutWorker(
        "w0",
        runtime=TinyRuntime(policy) if callable(policy) else policy,
        open_session=open_session,
        chat=LineChat(),
        ledger=store,
        settings=FAST,
    )
    try:
        worker.call(pool.start())
        worker.run(group_jobs(store.issue(jobs)))
    finally:
        worker.call(pool.close())
        worker.close()


def judged(store: Store, folder: Path) -> Played:
    """Score the round as the round machine does; metrics as the driver writes them."""
    model = RewardModel(RewardConfig())
    trajectories = store.load_trajectories("train", 0)
    scores = [
        (t.episode_id, model.score(t.to_episode(), model.initial_state())) for t in trajectories
    ]
    store.score(scores, stage=0)
    with store._ledger.session() as session:
        rows = session.scalars(select(EpisodeRow).order_by(EpisodeRow.id)).all()
    metrics = Metrics(folder)
    MetricsWatcher(metrics, store.failures).ended()
    values = {
        family.name: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    metrics.close()
    assert (folder / METRICS_FILE).read_text().count('"infra/') == len(values)
    return Played(
        outcomes=[Outcome(str(row.outcome)) for row in rows],
        correctness=[row.correctness for row in rows],
        rewards=[row.reward for row in rows],
        errors=[row.error for row in rows],
        failures=store.failures(),
        metrics={name: value for name, value in values.items() if value},
        attempts=sum(row.attempt for row in rows),
    )


def assert_nobodys_reward(played: Played, kind: str) -> None:
    """Null, not 0; counted once an episode, by kind, in the ledger and in the metrics."""
    number = len(played.outcomes)
    assert played.outcomes == [Outcome.INFRA_ERROR] * number, played
    assert played.correctness == played.rewards == [None] * number
    assert all(played.errors)
    assert played.failures == {kind: number}
    assert played.metrics == {f"parl_infra_{kind}": number}


def assert_the_policys(played: Played) -> None:
    """A number, and nothing is counted as infrastructure."""
    assert played.outcomes == [Outcome.COMPLETED] and played.correctness == [0.0], played
    assert played.rewards[0] is not None
    assert played.failures == {} and played.metrics == {} and played.attempts == 1


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own; skips where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(disk: Path) -> Path:
    """Take every byte that is left; remove the file to give them back."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    assert os.statvfs(disk).f_bavail == 0
    return path
