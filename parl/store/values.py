"""What goes into the ledger and comes out of it beside trajectories. Times are epoch seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parl.trajectory import Trajectory
from reward_models.episode import RewardBreakdown


@dataclass(frozen=True, slots=True)
class RunInfo:
    """``status``: running | finished | failed | stopped; ``error`` is one line."""

    run_id: str
    name: str
    kind: str
    status: str
    seed: int
    config: dict[str, Any]
    config_hash: str
    code_commit: str
    run_dir: str
    error: str | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """``phase``: train | sft | eval:<name>; versions and checkpoint are set by the commit."""

    phase: str
    index: int
    status: str
    stage: int | None
    weight_version_in: int | None
    weight_version_out: int | None
    checkpoint_path: str | None
    checkpoint_hash: str | None
    metrics: dict[str, Any]
    started_at: float
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class TypeStats:
    """One task type in one round; ``tokens_per_solved`` None when nothing was solved."""

    task_type: str
    num_episodes: int
    num_scored: int
    num_correct: int
    mean_tokens: float
    tokens_per_solved: float | None
    gate_open: bool
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """A decision or incident; ``key`` is what it is about (a task type, an episode id)."""

    kind: str
    round_index: int
    key: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    task_index: int | None = None
    sample: int | None = None
    id: int | None = None
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class RoundCommit:
    """Everything one commit transaction writes.

    ``dropped``: episode id -> reason; the other episodes of the round become trained.
    """

    phase: str
    index: int
    weight_version: int
    weight_checksum: str
    weight_path: str | None
    checkpoint_path: str | None
    checkpoint_hash: str | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    type_stats: Sequence[TypeStats] = ()
    events: Sequence[LedgerEvent] = ()


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One episode as `parl rl show` prints it; ``trajectory`` None until it is finished."""

    episode_id: str
    state: str
    drop_reason: str | None
    attempt: int
    worker: str | None
    task_id: str | None
    task_spec: dict[str, Any]
    budget: float | None
    stage: int | None
    weight_version: int | None
    trajectory: Trajectory | None
    reward: RewardBreakdown | None
    events: list[LedgerEvent]


@dataclass(frozen=True, slots=True)
class Audit:
    """Lost and duplicated work. ``ok`` = nothing to worry about.

    ``missing``: samples that the round's other tasks have; ``duplicated``: episodes of one phase
    that share a draw; ``stuck``: not at an end although their round is committed, or running
    without a sign of life; ``counts``: episodes by state; ``attempts``: re-issued attempts.
    """

    missing: list[str]
    duplicated: list[str]
    stuck: list[str]
    counts: dict[str, int]
    attempts: int

    @property
    def ok(self) -> bool:
        return not (self.missing or self.duplicated or self.stuck)
