"""Everything of a run in this process: for tests, debugging and machines without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.light.engine import LightEngine
from engine.model.model import PolicyModel
from engine.runtime.types import WeightSet
from infra.db.engine import Ledger
from infra.leases import LeaseBook
from parl.config import RunConfig
from parl.errors import RoundError
from parl.learner.learner import TokenLearner
from parl.rollout.jobs import GroupJob
from parl.rollout.worker import RolloutWorker
from parl.rounds.machine import RoundMachine
from parl.rounds.parts import RunParts, rollout_settings, sandbox_config
from parl.store.store import Store
from parl.weights.store import WeightStore
from sandbox.pool import SandboxPool


class LocalCollector:
    """One worker, one engine, one pool."""

    def __init__(self, parts: RunParts, store: Store, leases: LeaseBook, run_dir: Path) -> None:
        config = parts.config
        self._engine = LightEngine(config.model, config.engine)
        self._pool = SandboxPool(
            parts.family.bundle,
            size=config.sandbox.pool_size,
            leases=leases,  # pyright: ignore[reportArgumentType] - a mapped column is a str
            config=sandbox_config(config, store.run_id),
        )
        self._worker = RolloutWorker(
            "local",
            runtime=self._engine,
            open_session=self._pool.acquire,
            chat=parts.chat,
            ledger=store,
            settings=rollout_settings(config),
            run_dir=run_dir,
        )
        self._worker.call(self._pool.start())

    def collect(self, groups: Sequence[GroupJob], deadline_s: float) -> None:
        failed = [s for s in self._worker.run(groups, deadline_s) if s.outcome == "infra_error"]
        if failed:
            raise RoundError(
                f"{len(failed)} episodes failed for good, the first is {failed[0].episode_id}: "
                f"{failed[0].error}; repair the cause and run `parl rl resume`"
            )

    def publish(self, weights: WeightSet) -> None:
        asyncio.run(self._engine.load_weights(weights))

    def close(self) -> None:
        self._worker.call(self._pool.close())
        self._worker.close()
        self._engine.close()


def build_local(config: RunConfig, run_id: str, run_dir: Path, ledger: Ledger) -> RoundMachine:
    """A machine that needs nothing but this process."""
    torch.set_num_threads(config.ray.learner_threads)
    parts = RunParts.of(config)
    store = Store(ledger, run_id)
    return RoundMachine(
        config,
        store=store,
        weights=WeightStore(run_dir / "weights"),
        learner=TokenLearner(PolicyModel(config.model, config.run.seed), config.learner),
        collector=LocalCollector(parts, store, LeaseBook(ledger), run_dir),
        tasks=parts.tasks,
        jobs=parts.jobs(run_id),
        run_dir=run_dir,
    )
