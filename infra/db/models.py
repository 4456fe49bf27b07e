"""Tables of the ledger. Times are float epoch seconds; ``*_json`` columns take Python values.

Blobs are little-endian arrays: ``*_ids`` int32, ``logprobs`` float32, ``loss_mask`` uint8,
``experts`` int16 with their shape beside them. Foreign keys are checked at commit, so the order
of inserts inside a transaction does not matter. Domain objects map to rows in parl/store.py.

A change here needs a migration (infra/db/migrations) and a new SCHEMA_HEAD in infra/db/schema.py.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from infra.db.types import AnyText, JsonText

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
ROUND_STATUSES = ("issued", "collected", "scored", "trained", "committed")
EPISODE_STATES = ("issued", "running", "finished", "scored", "trained", "dropped")


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar = {str: String(), float: Double(), bytes: LargeBinary()}


def _reference(target: str, ondelete: str | None = "CASCADE") -> ForeignKey:
    return ForeignKey(target, ondelete=ondelete, deferrable=True, initially="DEFERRED")


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


class RunRow(Base):
    __tablename__ = "run"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    kind: Mapped[str]
    status: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    config_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    config_hash: Mapped[str] = mapped_column(default="")
    code_commit: Mapped[str] = mapped_column(default="")
    run_dir: Mapped[str] = mapped_column(AnyText, default="")
    error: Mapped[str | None] = mapped_column(AnyText)
    created_at: Mapped[float] = mapped_column(default=time.time)
    updated_at: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)


class RoundRow(Base):
    """``phase`` is "train", "warm_start" or "eval:<name>"."""

    __tablename__ = "round"
    __table_args__ = (_one_of("status", ROUND_STATUSES),)

    run_id: Mapped[str] = mapped_column(_reference("run.id"), primary_key=True)
    phase: Mapped[str] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="issued")
    stage: Mapped[int | None]
    weight_version_in: Mapped[int | None]
    weight_version_out: Mapped[int | None]
    checkpoint_path: Mapped[str | None] = mapped_column(AnyText)
    checkpoint_hash: Mapped[str | None]
    metrics_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    started_at: Mapped[float] = mapped_column(default=time.time)
    finished_at: Mapped[float | None]


class TaskRow(Base):
    """``id`` is the hash of the task's content: of the spec for an instance that a run drew, of the
    folder (or family) for one that was certified or published. ``archive``: the published folder
    as tar.gz; ``version`` then counts the publications of a name from 1."""

    __tablename__ = "task"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    version: Mapped[str] = mapped_column(default="")
    task_type: Mapped[str]
    spec_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)
    published_at: Mapped[float | None]
    archive: Mapped[bytes | None]


class TaskCertificateRow(Base):
    """``report_json``: the certificate and the whole report; ``public_key`` (hex) signed it."""

    __tablename__ = "task_certificate"

    id: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(_reference("task.id"), index=True)
    signature: Mapped[str]
    public_key: Mapped[str] = mapped_column(default="", server_default="")
    report_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)


class TaskTypeStatsRow(Base):
    __tablename__ = "task_type_stats"

    run_id: Mapped[str] = mapped_column(_reference("run.id"), primary_key=True)
    round_index: Mapped[int] = mapped_column(primary_key=True)
    task_type: Mapped[str] = mapped_column(primary_key=True)
    num_episodes: Mapped[int] = mapped_column(default=0)
    num_scored: Mapped[int] = mapped_column(default=0)
    num_correct: Mapped[int] = mapped_column(default=0)
    mean_tokens: Mapped[float] = mapped_column(default=0.0)
    tokens_per_solved: Mapped[float | None]
    gate_open: Mapped[bool] = mapped_column(default=False)
    metrics_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)


class EpisodeRow(Base):
    """One trajectory and its state. The unique key's prefix serves lookups by round."""

    __tablename__ = "episode"
    __table_args__ = (
        UniqueConstraint("run_id", "phase", "round_index", "task_index", "sample"),
        Index(None, "run_id", "state"),
        _one_of("state", EPISODE_STATES),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(_reference("run.id"))
    phase: Mapped[str]
    round_index: Mapped[int]
    task_index: Mapped[int]
    sample: Mapped[int]
    task_name: Mapped[str]
    task_type: Mapped[str]
    task_id: Mapped[str | None] = mapped_column(_reference("task.id", None), index=True)
    state: Mapped[str] = mapped_column(default="issued")
    drop_reason: Mapped[str | None] = mapped_column(AnyText)
    attempt: Mapped[int] = mapped_column(default=0)
    outcome: Mapped[str | None]
    correctness: Mapped[float | None]
    reward: Mapped[float | None]
    reward_reasons_json: Mapped[list[Any]] = mapped_column(JsonText, default=list)
    num_tokens: Mapped[int] = mapped_column(default=0)
    num_turns: Mapped[int] = mapped_column(default=0)
    num_calls: Mapped[int] = mapped_column(default=0)
    budget: Mapped[float | None]
    budget_units_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    min_tokens: Mapped[int | None]
    max_tokens: Mapped[int | None]
    stage: Mapped[int | None]
    weight_version: Mapped[int | None]
    draw_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    prompt_ids: Mapped[bytes | None]
    verdict_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    sandbox_json: Mapped[dict[str, Any]] = mapped_column(
        JsonText, default=dict, server_default="{}"
    )
    """Limits that the box enforced."""
    final_text: Mapped[str] = mapped_column(AnyText, default="")
    error: Mapped[str | None] = mapped_column(AnyText)
    formula_version: Mapped[str | None]
    worker: Mapped[str | None]
    elapsed_s: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[float] = mapped_column(default=time.time)
    updated_at: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)


class TurnRow(Base):
    __tablename__ = "turn"

    episode_id: Mapped[str] = mapped_column(_reference("episode.id"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    weight_version: Mapped[int]
    finish: Mapped[str]
    sampled_ids: Mapped[bytes]
    logprobs: Mapped[bytes]
    loss_mask: Mapped[bytes]
    observation_ids: Mapped[bytes] = mapped_column(default=b"")
    experts: Mapped[bytes | None]
    experts_shape: Mapped[str | None]
    experts_start: Mapped[int] = mapped_column(default=0)
    selections: Mapped[bytes | None]
    """zlib; of engines with hybrid attention"""
    selections_shape: Mapped[str | None]
    """dtype:sizes, as <i2:150,3,2,2,16"""
    warm_reads: Mapped[int] = mapped_column(default=0)
    retrieved: Mapped[int] = mapped_column(default=0)
    codes: Mapped[bytes | None]
    """zlib; of blocks from codes_start on, as engines with hybrid attention report them"""
    codes_shape: Mapped[str | None]
    codes_start: Mapped[int] = mapped_column(default=1)
    media_json: Mapped[list[Any]] = mapped_column(JsonText, default=list)


class ToolCallRow(Base):
    __tablename__ = "tool_call"

    episode_id: Mapped[str] = mapped_column(_reference("episode.id"), primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    name_text: Mapped[str] = mapped_column(AnyText)
    arguments_text: Mapped[str] = mapped_column(AnyText)
    tool: Mapped[str | None] = mapped_column(AnyText)
    arguments_json: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    observation: Mapped[str] = mapped_column(AnyText, default="")
    error: Mapped[str | None] = mapped_column(AnyText)
    repairs_json: Mapped[list[Any]] = mapped_column(JsonText, default=list)
    elapsed_s: Mapped[float] = mapped_column(default=0.0)


class RewardPartRow(Base):
    __tablename__ = "reward_part"

    episode_id: Mapped[str] = mapped_column(_reference("episode.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class WeightVersionRow(Base):
    __tablename__ = "weight_version"

    run_id: Mapped[str] = mapped_column(_reference("run.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    checksum: Mapped[str]
    path: Mapped[str | None] = mapped_column(AnyText)
    round_index: Mapped[int | None]
    created_at: Mapped[float] = mapped_column(default=time.time)


class LeaseRow(Base):
    """An external thing (``kind``, ``ref``) and who answers for it until ``deadline``."""

    __tablename__ = "lease"
    __table_args__ = (UniqueConstraint("kind", "ref"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    ref: Mapped[str] = mapped_column(AnyText)
    owner: Mapped[str]
    data_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    deadline: Mapped[float]
    created_at: Mapped[float] = mapped_column(default=time.time)


class EventRow(Base):
    """A decision that later ones depend on: stage switch, budget, gate. Folded in id order."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "run_id", "kind", "round_index"),)

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    run_id: Mapped[str] = mapped_column(_reference("run.id"))
    round_index: Mapped[int]
    task_index: Mapped[int | None]
    sample: Mapped[int | None]
    kind: Mapped[str]
    key: Mapped[str] = mapped_column(default="")
    data_json: Mapped[dict[str, Any]] = mapped_column(JsonText, default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)
