"""A whole run small enough to repeat: a one-layer policy, real engine, learner, worker and ledger.

Only the box is replaced: tools answer in this process. ``Run`` can be killed at a named call of any
of its parts and opened again from what is on disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.light.engine import LightEngine
from engine.model.model import PolicyModel
from engine.runtime.types import WeightSet
from infra.db.engine import Ledger, open_ledger
from parl.config import RunConfig
from parl.errors import RoundError
from parl.learner.learner import TokenLearner
from parl.rollout.jobs import GroupJob
from parl.rollout.worker import RolloutWorker
from parl.rounds.machine import RoundMachine
from parl.rounds.parts import RunParts, rollout_settings
from parl.rounds.ports import LearnerPort
from parl.store.store import Store
from parl.weights.store import WeightStore
from sandbox.fakes import InProcessSession
from sandbox.session import Session
from sandbox.task import TaskSpec

RUN_ID = "tiny-1"
WORDS = (
    *("user", "assistant", "tool", "system", "## Return of ", "lookup ", "add "),
    *("functions.lookup:", "functions.calc:", '{"key":"', '{"expression":"', '"}'),
)
SETTINGS: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 7},
    "chat": {"words": WORDS, "declare_tools": "none"},
    "model": {
        "vocab_size": 291,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "engine": {"deterministic": True, "num_blocks": 256, "max_contexts": 64},
    "rollout": {
        "num_prompts": 2,
        "num_samples": 4,
        "max_turns": 3,
        "max_tokens": 40,
        "max_tokens_per_turn": 20,
        "max_attempts": 1,
    },
    "warm_start": {
        "clean_steps": 24,
        "sloppy_steps": 4,
        "batch_size": 8,
        "num_demonstrations": 16,
    },
    "rounds": {"num_rounds": 4, "eval_episodes": 4, "checkpoint_every": 2},
}


def tiny_config(**rounds: Any) -> RunConfig:
    """The run's config; ``rounds`` replaces keys of its [rounds]."""
    return RunConfig.model_validate({**SETTINGS, "rounds": {**SETTINGS["rounds"], **rounds}})


class Killed(Exception):
    """The process ended here."""


class InProcessCollector:
    """parl.rounds.local.LocalCollector with sessions that need no box."""

    def __init__(self, parts: RunParts, store: Store) -> None:
        config = parts.config
        self.engine = LightEngine(config.model, config.engine)
        self._bundle = parts.family.bundle
        self.broken: str = ""
        """While set, no session opens: the infrastructure fails with this message."""
        self._worker = RolloutWorker(
            "tiny",
            runtime=self.engine,
            open_session=self._open,
            chat=parts.chat,
            ledger=store,
            settings=rollout_settings(config),
        )

    async def _open(self, task: TaskSpec, owner: str) -> Session:
        if self.broken and "/00001/" in owner:  # episodes of the second prompt
            raise OSError(self.broken)
        return InProcessSession(task, self._bundle)

    def collect(self, groups: Sequence[GroupJob], deadline_s: float) -> None:
        failed = [s for s in self._worker.run(groups, deadline_s) if s.outcome == "infra_error"]
        if failed:
            raise RoundError(f"{len(failed)} episodes failed, the first: {failed[0].error}")

    def publish(self, weights: WeightSet) -> None:
        asyncio.run(self.engine.load_weights(weights))

    def close(self) -> None:
        self._worker.close()
        self.engine.close()


@dataclass
class Run:
    """One process's life of a run: everything is built from ``folder`` alone."""

    folder: Path
    config: RunConfig
    parts: RunParts
    ledger: Ledger
    store: Store
    weights: WeightStore
    learner: TokenLearner
    collector: InProcessCollector
    machine: RoundMachine

    @staticmethod
    def open(folder: Path, config: RunConfig | None = None) -> Run:
        """Build all parts and restore; a new folder begins a new run."""
        config = config or tiny_config()
        parts = RunParts.of(config)
        fresh = not (folder / "ledger.db").exists()
        ledger = open_ledger(f"sqlite:///{folder}/ledger.db")
        store = Store(ledger, RUN_ID)
        if fresh:
            store.create_run(name="tiny", kind="rl", seed=config.run.seed, config={})
        weights = WeightStore(folder / "weights")
        learner = TokenLearner(PolicyModel(config.model, config.run.seed), config.learner)
        collector = InProcessCollector(parts, store)
        machine = RoundMachine(
            config,
            store=store,
            weights=weights,
            learner=learner,
            collector=collector,
            tasks=parts.tasks,
            jobs=parts.jobs(RUN_ID),
            run_dir=folder,
        )
        run = Run(
            folder, config, parts, ledger, store, weights, learner, collector, machine
        )
        try:
            machine.restore()
        except Exception:
            run.close()
            raise
        return run

    def close(self) -> None:
        """End threads and connections; writes nothing."""
        self.machine.close()
        self.ledger.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def warm_start(self) -> None:
        self.machine.warm_start(self.supervise)

    def supervise(self, learner: LearnerPort) -> dict[str, float]:
        return self.parts.warm_start()(learner, lambda done, total, loss: None)

    def finish(self) -> None:
        """All rounds that are left."""
        while not self.machine.finished:
            self.machine.step()

    def kill(self, part: str, method: str, when: str = "after", nth: int = 1) -> None:
        """Raise Killed before or after the ``nth`` call of a part's method, and at every later one:
        a dead process does nothing more."""
        owner = getattr(self, part)
        original: Callable[..., Any] = getattr(owner, method)
        calls = 0

        def dies(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > nth or (calls == nth and when == "before"):
                raise Killed(f"before {part}.{method}")
            result = original(*args, **kwargs)
            if calls == nth:
                raise Killed(f"after {part}.{method}")
            return result

        setattr(owner, method, dies)


def copy_run(source: Path, target: Path) -> Path:
    """What a run left on disk, somewhere else: the folder is all that a resume needs."""
    shutil.copytree(source, target)
    return target


def facts(store: Store) -> dict[str, Any]:
    """Everything that must not depend on how often the run was interrupted, bit for bit."""
    committed = store.committed_rounds()
    rounds = {
        f"{row.phase}-{row.index}": {
            "metrics": {k: v for k, v in row.metrics.items() if k != "peak_memory_mib"},
            "checkpoint": row.checkpoint_hash,
            "weights": store.weight_checksum(row.weight_version_out or 0),
            "stage": row.stage,
        }
        for row in committed
    }
    episodes = {}
    for row in committed:
        for trajectory in store.load_trajectories(row.phase, row.index):
            view = store.show(trajectory.episode_id)
            assert view.reward is not None
            episodes[trajectory.episode_id] = (
                view.state,
                view.budget,
                view.weight_version,
                view.reward,
                str(trajectory.outcome),
                trajectory.correctness,
                trajectory.token_ids().tobytes(),
                b"".join(turn.logprobs.tobytes() for turn in trajectory.turns),
            )
    decisions = [
        (e.kind, e.round_index, e.key, e.data)
        for e in store.events()
        if not e.kind.startswith("episode_")
    ]
    return {
        "rounds": rounds,
        "episodes": episodes,
        "stats": store.type_stats(),
        "events": decisions,
    }
