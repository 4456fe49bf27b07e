"""``parl task run --agent engine``: a run's newest weights play one episode of any task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from engine.light.engine import LightEngine
from parl.cli.runs import find_run
from parl.cli.visible import visible
from parl.errors import RunError
from parl.rollout.worker import RolloutWorker
from parl.rounds.jobs import JobMaker
from parl.rounds.parts import RunParts, rollout_settings, sandbox_config
from parl.trajectory import Trajectory
from parl.weights.store import WeightStore
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool, config_for
from sandbox.session import Verdict
from sandbox.task import TaskSpec, ToolBundle

PHASE = "eval:task-run"


class Kept:
    """The ledger of one episode, in memory; implements parl.rollout.worker.EpisodeLedger."""

    def __init__(self) -> None:
        self.trajectory: Trajectory | None = None
        self._attempts = 0

    def mark_running(self, episode_id: str, worker: str, reason: str = "") -> int:
        self._attempts += 1
        return self._attempts

    def finish(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory


def run_engine(
    spec: TaskSpec,
    bundle: ToolBundle,
    run_name: str | None,
    runs_dir: Path,
    say: Callable[[str], None],
) -> Verdict:
    """Sampled as in an evaluation of the run. RunError when the run has no weights yet; an episode
    that fails for another reason than the policy gives a verdict with ``error``."""
    folder = find_run(run_name, runs_dir)
    config = folder.config
    weights = WeightStore(folder.path / "weights")
    version = weights.latest()
    if version is None:
        raise RunError(f"run {folder.run_id} has published no weights yet; wait for its start")
    say(f"run {folder.run_id}, weights {version}")
    engine = LightEngine(config.model, config.engine)
    pool = SandboxPool(
        bundle, size=1, leases=MemoryLeases(), config=config_for(spec, sandbox_config(config))
    )
    kept = Kept()
    worker = RolloutWorker(
        "task-run",
        runtime=engine,
        open_session=pool.acquire,
        chat=RunParts.of(config).chat,
        ledger=kept,
        settings=rollout_settings(config),
    )
    try:
        asyncio.run(engine.load_weights(weights.fetch(version)))
        worker.call(pool.start())
        jobs = JobMaker(config, "task-run").eval_groups(PHASE, [spec], version)
        (summary,) = worker.run(jobs, config.rollout.round_timeout_s)
    finally:
        worker.call(pool.close())
        worker.close()
        engine.close()
    if kept.trajectory is None:
        return Verdict(None, False, error=f"{summary.outcome}: {summary.error}")
    return _told(kept.trajectory, spec, say)


def _told(trajectory: Trajectory, spec: TaskSpec, say: Callable[[str], None]) -> Verdict:
    for call in trajectory.calls:
        say(visible(f"> {call.name_text} {call.arguments_text}\n{call.observation}"))
    say(f"answer: {visible(trajectory.final_text)}")
    say(f"outcome {trajectory.outcome}")
    correctness = trajectory.correctness
    return Verdict(
        correctness=correctness,
        passed=correctness is not None and correctness >= spec.pass_threshold,
        error=trajectory.error,
    )
