"""One RL round as a state machine whose memory is the ledger.

issue -> collect -> score -> update -> checkpoint -> commit -> publish. A crash anywhere leaves rows
that say what is missing; ``restore`` plus the same calls end with the same bits. There is one
commit point a round: learner step, checkpoint on disk, then one transaction that names its hash.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from engine.runtime.types import WeightSet
from engine.runtime.weights import make_weight_set
from infra.log import bound
from parl.config import RunConfig
from parl.errors import CheckpointError, RoundError
from parl.rollout.jobs import GroupJob
from parl.rounds.agreement import require_agreement
from parl.rounds.batch import Batch, make_batch
from parl.rounds.checkpoint import CHECKPOINTS, newest_intact, prune, sweep, write_checkpoint
from parl.rounds.clock import Clock
from parl.rounds.jobs import JobMaker
from parl.rounds.ports import Collector, LearnerPort
from parl.rounds.reports import EvalReport, RoundReport
from parl.rounds.summary import eval_report, round_report, type_stats
from parl.rounds.tasks import TaskSource
from parl.store.store import Store
from parl.store.values import LedgerEvent, RoundCommit, RoundInfo
from parl.trajectory import Trajectory
from parl.weights.store import WeightStore
from reward_models.episode import Episode, RewardBreakdown
from reward_models.stages import Event, RewardModel, RewardState

log = structlog.get_logger(__name__)

WARM_START = "sft"
TRAIN = "train"
NO_WEIGHTS = -1
"""Weight version before the warm start is committed."""


class RoundMachine:
    """Runs warm start, rounds and evaluations of one run; every method is safe to call again."""

    def __init__(
        self,
        config: RunConfig,
        *,
        store: Store,
        weights: WeightStore,
        learner: LearnerPort,
        collector: Collector,
        tasks: TaskSource,
        jobs: JobMaker,
        run_dir: Path,
    ) -> None:
        self.config = config
        self.store = store
        self._weights = weights
        self._learner = learner
        self._collector = collector
        self._tasks = tasks
        self._jobs = jobs
        self._checkpoints = run_dir / CHECKPOINTS
        self._reward = RewardModel(config.reward)
        self._state: RewardState = self._reward.initial_state()
        self._version = NO_WEIGHTS
        self.next_round = 0

    @property
    def weight_version(self) -> int:
        """Version the engines serve; -1 before the warm start is committed."""
        return self._version

    @property
    def finished(self) -> bool:
        """Whether every RL round is committed."""
        return self.next_round >= self.config.rounds.num_rounds

    # -- resume ---------------------------------------------------------------------------------

    def restore(self) -> None:
        """Make learner, reward state and engines what the ledger says they are.

        Loads the newest committed checkpoint that is whole, replays the rounds committed after it
        from their ledgered batches and compares each version with its committed checksum.
        CheckpointError when none is whole or a checksum differs; RunError when the ledger is torn.
        """
        committed = self.store.committed_rounds()
        named = [Path(row.checkpoint_path) for row in committed if row.checkpoint_path]
        for path in sweep(self._checkpoints, named):
            log.info("checkpoint_swept", path=str(path), why="no committed round names it")
        if not committed:
            return
        newest = self._load_newest(committed)
        self._state = self._reward.initial_state()
        for position, row in enumerate(committed):
            if row.phase == TRAIN:
                self._replay(row, learn=position > newest)
            if position >= newest:
                weights = self._restored_weights(row)
        self._version = weights.manifest.version
        self.next_round = sum(row.phase == TRAIN for row in committed)
        self._weights.publish(weights)
        self._collector.publish(weights)

    def _load_newest(self, committed: Sequence[RoundInfo]) -> int:
        """Bring the learner to the newest whole checkpoint; returns the index of its round."""
        rows = [
            (i, row.checkpoint_path, row.checkpoint_hash)
            for i, row in enumerate(committed)
            if row.checkpoint_path is not None and row.checkpoint_hash is not None
        ]
        found = newest_intact(self._checkpoints, [(path, digest) for _, path, digest in rows])
        index, path, _ = rows[found]
        # by name, not by path: a run folder may be moved, or reached by another path
        self._learner.restore(self._checkpoints / Path(path).name)
        return index

    def _replay(self, row: RoundInfo, *, learn: bool) -> None:
        """Fold a committed round into the reward state; ``learn``: take its step again first."""
        trajectories = self.store.load_trajectories(TRAIN, row.index)
        if learn:
            breakdowns = self._score(trajectories)
            self._learn(self._batch(trajectories, breakdowns, row.index))
            log.info("round_replayed", round=row.index)
        self._state, _ = self._reward.fold(self._state, _episodes(trajectories))

    def _restored_weights(self, row: RoundInfo) -> WeightSet:
        """The learner's weights, which must be those that ``row`` committed."""
        version = row.weight_version_out
        assert version is not None, f"{row.phase} round {row.index}: committed without weights"
        weights = self._weight_set(version)
        expected = self.store.weight_checksum(version)
        if weights.manifest.checksum != expected:
            raise CheckpointError(
                f"restored weights of version {version} have checksum "
                f"{weights.manifest.checksum[:12]}, the ledger expects {expected[:12]}; the run "
                "was not deterministic or its code changed: resume with the commit the run row "
                "names"
            )
        return weights

    # -- warm start -----------------------------------------------------------------------------

    def warm_start(self, train: Callable[[LearnerPort], dict[str, float]]) -> None:
        """Run ``train`` on the learner once and commit weight version 0; no-op when committed."""
        if self._version >= 0:
            return
        self.store.begin_round(WARM_START, 0, stage=0, weight_version_in=NO_WEIGHTS)
        metrics = train(self._learner)
        if metrics:  # a warm start of no steps has none
            _expect_finite(metrics, "rates in [warm_start]")
        self._commit(WARM_START, 0, version=0, checkpoint=True, metrics=metrics, batch=None)

    # -- one round ------------------------------------------------------------------------------

    def step(self) -> RoundReport:
        """Run (or finish) round ``next_round`` and commit it."""
        with bound(round=self.next_round):
            return self._step(self.next_round)

    def _step(self, index: int) -> RoundReport:
        clock = Clock()
        trained = [row for row in self.store.committed_rounds() if row.phase == TRAIN]
        require_agreement(trained, self.config.learner.mismatch)
        self.store.begin_round(
            TRAIN, index, stage=self._state.stage, weight_version_in=self._version
        )
        groups = self._jobs.train_groups(
            index,
            self._tasks.train(index),
            self._version,
            self._state.stage,
            lambda task: self._reward.budget(task.budget_units, task.task_type, self._state),
        )
        trajectories = self._collect(TRAIN, index, groups)
        self.store.set_round_status(TRAIN, index, "collected")
        clock.lap("collect")
        breakdowns = self._score(trajectories)
        self.store.score(
            [(t.episode_id, b) for t, b in zip(trajectories, breakdowns, strict=True)],
            stage=self._state.stage,
        )
        self.store.set_round_status(TRAIN, index, "scored")
        batch = self._batch(trajectories, breakdowns, index)
        clock.lap("score")
        metrics = self._learn(batch)
        clock.lap("update")
        self._state, events = self._reward.fold(self._state, _episodes(trajectories))
        last = index + 1 == self.config.rounds.num_rounds
        due = last or (index + 1) % self.config.rounds.checkpoint_every == 0
        report = round_report(
            index,
            self.config.rounds.num_rounds,
            trajectories,
            breakdowns,
            self._state,
            metrics,
            self._version + 1,
        )
        self._commit(
            TRAIN,
            index,
            version=self._version + 1,
            checkpoint=due,
            metrics=metrics,
            batch=batch,
            trajectories=trajectories,
            events=events,
        )
        self.next_round = index + 1
        clock.lap("commit")
        report.seconds.update(clock.laps)
        return report

    def evaluate(self, name: str) -> EvalReport:
        """Held-out episodes at the rollout temperature with the current weights; committed once."""
        phase = f"eval:{name}"
        count = self.config.rounds.eval_episodes
        version = self.store.round_version(phase, 0)
        if version is None or not self.store.is_committed(phase, 0):
            version = self._version
            self.store.begin_round(phase, 0, stage=self._state.stage, weight_version_in=version)
            groups = self._jobs.eval_groups(phase, self._tasks.heldout(count), version)
            trajectories = self._collect(phase, 0, groups)
            self.store.commit_eval(phase, 0, version)
        else:
            trajectories = self.store.load_trajectories(phase, 0)
        return eval_report(name, trajectories, version)

    def close(self) -> None:
        """Close the collector; the ledger has everything else."""
        self._collector.close()

    # -- parts ----------------------------------------------------------------------------------

    def _collect(self, phase: str, index: int, groups: Sequence[GroupJob]) -> list[Trajectory]:
        # what the infrastructure failed last time gets another try with the same draws
        reopened = self.store.reopen_failed(phase, index)
        if reopened:
            log.info("episodes_reopened", phase=phase, count=len(reopened))
        todo = self.store.issue([job for group in groups for job in group.jobs])
        missing = {job.episode_id for job in todo}
        left = [g for g in (group.only(missing) for group in groups) if g.jobs]
        if left:
            self._collector.collect(left, self.config.rollout.round_timeout_s)
        trajectories = self.store.load_trajectories(phase, index)
        wanted = sum(len(group.jobs) for group in groups)
        if len(trajectories) != wanted:
            raise RoundError(
                f"{phase} round {index} has {len(trajectories)} finished episodes, expected "
                f"{wanted}; `parl rl status` lists their states, `parl rl resume` goes on"
            )
        return trajectories

    def _score(self, trajectories: Sequence[Trajectory]) -> list[RewardBreakdown]:
        return self._reward.score_all([t.to_episode() for t in trajectories], self._state)

    def _batch(
        self, trajectories: Sequence[Trajectory], breakdowns: Sequence[RewardBreakdown], index: int
    ) -> Batch:
        seed = self.config.run.seed * 1_000_003 + index
        batch = make_batch(
            trajectories,
            breakdowns,
            advantage=self.config.rounds.advantage,
            permute_seed=seed if self.config.rounds.permute_rewards else None,
        )
        if not batch.samples:
            raise RoundError(
                f"round {index}: none of {len(trajectories)} episodes has a reward "
                f"({sorted({str(t.outcome) for t in trajectories})}); see the episodes' errors "
                "with `parl rl status`"
            )
        return batch

    def _learn(self, batch: Batch) -> dict[str, float]:
        metrics = self._learner.update(batch.samples, batch.advantages)
        _expect_finite(metrics, "rates in [learner.optim]")
        return metrics

    def _weight_set(self, version: int) -> WeightSet:
        return make_weight_set(
            version, self._learner.weights(), self.config.model.model_dump(mode="json")
        )

    def _commit(
        self,
        phase: str,
        index: int,
        *,
        version: int,
        checkpoint: bool,
        metrics: dict[str, float],
        batch: Batch | None,
        trajectories: Sequence[Trajectory] = (),
        events: Sequence[Event] = (),
    ) -> None:
        path, digest = None, None
        if checkpoint:
            path, digest = write_checkpoint(
                self._learner, self._checkpoints, f"{phase}-{index:05d}"
            )
        weights = self._weight_set(version)
        folder = self._weights.publish(weights)
        self.store.commit_round(
            RoundCommit(
                phase=phase,
                index=index,
                weight_version=version,
                weight_checksum=weights.manifest.checksum,
                weight_path=str(folder),
                checkpoint_path=None if path is None else str(path),
                checkpoint_hash=digest,
                metrics=metrics,
                dropped={} if batch is None else batch.dropped,
                type_stats=type_stats(trajectories, self._state),
                events=[LedgerEvent(e["kind"], index, e["key"], e["data"]) for e in events],
            )
        )
        self._version = version
        self._collector.publish(weights)
        if checkpoint:
            rows = self.store.committed_rounds()
            named = [Path(row.checkpoint_path) for row in rows if row.checkpoint_path]
            prune(self._checkpoints, named, self.config.rounds.keep_checkpoints)


def _episodes(trajectories: Sequence[Trajectory]) -> list[Episode]:
    return [t.to_episode() for t in trajectories]


def _expect_finite(metrics: Mapping[str, float], rates: str) -> None:
    """RoundError for a step that ruined the parameters; ``rates`` names the knob to turn."""
    bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
    if bad:
        raise RoundError(
            f"learner returned {', '.join(f'{n}={metrics[n]}' for n in bad)}, expected finite "
            f"numbers; nothing was committed, the last checkpoint is intact: begin a run with "
            f"lower {rates}"
        )
