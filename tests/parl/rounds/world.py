"""A whole run small enough to repeat: a one-layer policy, real engine, learner, worker and ledger.

Only the box is replaced: tools answer in this process. ``Run`` can be killed at a named call of any
of its parts and opened again from what is on disk.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import select

from engine.light.engine import LightEngine
from engine.model.model import PolicyModel
from engine.runtime.types import WeightSet
from infra.db.engine import Ledger, open_ledger
from infra.db.models import EpisodeRow, RewardPartRow
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
from sandbox.calls.decode import DEFAULT_POLICY
from sandbox.calls.policy import RepairPolicy
from sandbox.calls.table import ToolTable
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
    "engine": {"deterministic": True, "num_blocks": 256, "max_contexts": 64, "max_rows": 32},
    "rollout": {
        "num_prompts": 3,
        "num_samples": 4,
        "max_turns": 3,
        "max_tokens": 40,
        "max_tokens_per_turn": 20,
        "max_attempts": 1,
    },
    # mostly guesses: soon learnt, and right often enough that rewards differ inside a group
    "warm_start": {
        "clean_steps": 0,
        "sloppy_steps": 40,
        "sloppy_share": 1.0,
        "sloppy_rate": 1.0,
        "guess": 0.8,
        "filler": 0.0,
        "redundant": 0.0,
        "batch_size": 16,
        "num_demonstrations": 16,
        "muon_lr": 0.03,
        "adamw_lr": 0.01,
    },
    "rounds": {"num_rounds": 4, "eval_episodes": 4, "checkpoint_every": 2},
}


def tiny_config(**sections: dict[str, Any]) -> RunConfig:
    """The run's config; ``sections`` replaces keys of its sections."""
    changed = {name: {**SETTINGS[name], **section} for name, section in sections.items()}
    return RunConfig.model_validate({**SETTINGS, **changed})


class Killed(Exception):
    """The process ended here."""


class InProcessCollector:
    """parl.rounds.local.LocalCollector with sessions that need no box."""

    def __init__(self, parts: RunParts, store: Store) -> None:
        config = parts.config
        self.engine = LightEngine(config.model, config.engine)
        self._bundle = parts.family.bundle
        self._tables: dict[str, ToolTable] = {}
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

    async def _open(
        self, spec: TaskSpec, owner: str = "", *, repair: RepairPolicy = DEFAULT_POLICY
    ) -> Session:
        if self.broken and "/00001/" in owner:  # episodes of the second prompt
            raise OSError(self.broken)
        # a pool compiles a family's schemas once too
        if spec.task_type not in self._tables:
            self._tables[spec.task_type] = ToolTable(spec.tools, spec.forbidden_tools)
        return InProcessSession(spec, self._bundle, self._tables[spec.task_type], repair)

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
        torch.set_num_threads(1)  # the bits of a matrix product depend on it
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
        run = Run(folder, config, parts, ledger, store, weights, learner, collector, machine)
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


def copy_run(source: Run | Path, target: Path) -> Path:
    """What a run has on disk, somewhere else: the folder is all that a resume needs."""
    if isinstance(source, Run):
        # a live SQLite database is copied by itself, not file by file
        shutil.copytree(source.folder, target, ignore=shutil.ignore_patterns("ledger.db*"))
        with (
            closing(sqlite3.connect(source.folder / "ledger.db")) as live,
            closing(sqlite3.connect(target / "ledger.db")) as copy,
        ):
            live.backup(copy)
    else:
        shutil.copytree(source, target)
    return target


def facts(run: Run) -> dict[str, Any]:
    """Everything that must not depend on how often the run was interrupted, bit for bit."""
    store = run.store
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
    tokens = {
        t.episode_id: [
            *(t.outcome, t.correctness, t.token_ids().tobytes()),
            *(turn.logprobs.tobytes() for turn in t.turns),
        ]
        for row in committed
        for t in store.load_trajectories(row.phase, row.index)
    }
    with run.ledger.session() as session:
        rewards = session.execute(
            select(
                EpisodeRow.id,
                EpisodeRow.state,
                EpisodeRow.reward,
                EpisodeRow.budget,
                EpisodeRow.weight_version,
            ).order_by(EpisodeRow.id)
        )
        parts = session.execute(
            select(RewardPartRow.episode_id, RewardPartRow.name, RewardPartRow.value).order_by(
                RewardPartRow.episode_id, RewardPartRow.name
            )
        )
        return {
            "rounds": rounds,
            "tokens": tokens,
            "rewards": [row.tuple() for row in rewards],
            "parts": [row.tuple() for row in parts],
            "stats": store.type_stats(),
            "decisions": [
                (e.kind, e.round_index, e.key, dict(e.data))
                for e in store.events()
                # those tell what happened on the way, not what was decided
                if not e.kind.startswith("episode_") and e.kind != "infra_failure"
            ],
        }
