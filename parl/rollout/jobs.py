"""What a rollout worker is asked to do: plain, picklable values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.runtime.types import DrawKey, Sampling
from sandbox.calls.decode import DEFAULT_POLICY
from sandbox.calls.policy import RepairPolicy
from sandbox.task import TaskSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of one episode. Tokens are sampled ones; ``deadline_s`` is wall clock of one
    attempt."""

    max_turns: int = 8
    max_tokens: int = 160
    max_tokens_per_turn: int = 64
    deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """One episode to run: sample ``sample`` of task ``task_index`` in a round.

    ``draw`` names its random stream, so that a repeated attempt samples the same tokens.
    ``budget`` is the token budget the reward will apply (None = not enforced); it is recorded, not
    enforced here. ``weight_version`` -1 = whatever the engine serves at the first step. ``repair``:
    how far the sandbox mends broken calls.
    """

    run_id: str
    phase: str
    round: int
    task_index: int
    sample: int
    task: TaskSpec
    draw: DrawKey
    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    budget: float | None = None
    stage: int = 0
    weight_version: int = -1
    repair: RepairPolicy = DEFAULT_POLICY

    @property
    def episode_id(self) -> str:
        """The one name of the episode; it never depends on worker or attempt."""
        return f"{self.group_key}/{self.sample:03d}"

    @property
    def group_key(self) -> str:
        return f"{self.run_id}/{self.phase}/{self.round:05d}/{self.task_index:05d}"


@dataclass(frozen=True, slots=True)
class GroupJob:
    """Episodes of one task instance that share the KV of their prompt. After a resume it may hold
    only those samples that are still missing, or none."""

    jobs: tuple[EpisodeJob, ...]

    def __post_init__(self) -> None:
        keys = sorted({job.group_key for job in self.jobs})
        if len(keys) > 1:
            raise ValueError(
                f"a group holds episodes of {len(keys)} tasks ({keys[0]}, {keys[1]}...); expected "
                "the samples of one; use group_jobs() to split them"
            )

    @property
    def key(self) -> str:
        """``run/phase/round/task``; empty for a group without jobs."""
        return self.jobs[0].group_key if self.jobs else ""

    def only(self, episode_ids: Collection[str]) -> GroupJob:
        """The part of the group that is named."""
        return GroupJob(tuple(job for job in self.jobs if job.episode_id in episode_ids))


def group_jobs(jobs: Sequence[EpisodeJob]) -> list[GroupJob]:
    """Groups in order of (run, phase, round, task), samples in order inside each."""
    groups: dict[str, list[EpisodeJob]] = {}
    for job in sorted(jobs, key=lambda j: (j.run_id, j.phase, j.round, j.task_index, j.sample)):
        groups.setdefault(job.group_key, []).append(job)
    return [GroupJob(tuple(members)) for members in groups.values()]
