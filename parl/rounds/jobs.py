"""Episode jobs of a round: who runs what with which draws. A pure function of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.runtime.types import DrawKey, Sampling
from parl.config import RunConfig
from parl.rollout.jobs import EpisodeJob, GroupJob, Limits
from sandbox.calls.policy import RepairMode, RepairPolicy
from sandbox.task import TaskSpec

TRAIN_STREAM = 0
EVAL_STREAM = 1

BudgetOf = Callable[[TaskSpec], float | None]


class JobMaker:
    """Turns task instances into groups of episode jobs for one run."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self._config = config
        self._run_id = run_id

    def train_groups(
        self, index: int, tasks: Sequence[TaskSpec], version: int, stage: int, budget: BudgetOf
    ) -> list[GroupJob]:
        """``rollout.num_samples`` episodes a task of RL round ``index``; ``budget`` is what the
        reward will enforce, recorded with each episode."""
        samples = self._config.rollout.num_samples
        mode = RepairMode(self._config.sandbox.repairs)
        progress = min(1.0, index / max(1, self._config.rounds.num_rounds))
        return self._groups(
            "train",
            index,
            tasks,
            version,
            samples,
            TRAIN_STREAM,
            stage,
            budget,
            RepairPolicy(mode, progress),
        )

    def eval_groups(self, phase: str, tasks: Sequence[TaskSpec], version: int) -> list[GroupJob]:
        """One episode a held-out task; the same draws at every evaluation (paired comparison)."""
        repair = RepairPolicy(RepairMode(self._config.sandbox.eval_repairs))
        return self._groups(phase, 0, tasks, version, 1, EVAL_STREAM, 0, lambda task: None, repair)

    def _groups(
        self,
        phase: str,
        index: int,
        tasks: Sequence[TaskSpec],
        version: int,
        num_samples: int,
        stream: int,
        stage: int,
        budget: BudgetOf,
        repair: RepairPolicy,
    ) -> list[GroupJob]:
        rollout = self._config.rollout
        limits = Limits(
            max_turns=rollout.max_turns,
            max_tokens=rollout.max_tokens,
            max_tokens_per_turn=rollout.max_tokens_per_turn,
            deadline_s=rollout.episode_timeout_s,
        )
        return [
            GroupJob(
                tuple(
                    EpisodeJob(
                        run_id=self._run_id,
                        phase=phase,
                        round=index,
                        task_index=position,
                        sample=sample,
                        task=task,
                        draw=DrawKey(self._config.run.seed, index, position, sample, stream),
                        limits=limits,
                        sampling=Sampling(temperature=rollout.temperature),
                        budget=budget(task),
                        stage=stage,
                        weight_version=version,
                        repair=repair,
                    )
                    for sample in range(num_samples)
                )
            )
            for position, task in enumerate(tasks)
        ]
