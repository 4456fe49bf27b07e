"""Rounds and their single commit, inside a transaction somebody else opened."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from infra.db.models import (
    ROUND_STATUSES,
    EpisodeRow,
    EventRow,
    RoundRow,
    TaskTypeStatsRow,
    WeightVersionRow,
)
from parl.errors import RunError
from parl.store import episodes
from parl.store.values import LedgerEvent, RoundCommit, RoundInfo


def begin(
    session: Session, run_id: str, phase: str, index: int, stage: int, weight_version_in: int
) -> RoundRow:
    """The round's row; one that a crash left open must have begun with the same weights."""
    row = session.get(RoundRow, (run_id, phase, index))
    if row is None:
        row = RoundRow(
            run_id=run_id,
            phase=phase,
            index=index,
            status="issued",
            stage=stage,
            weight_version_in=weight_version_in,
        )
        session.add(row)
        session.flush()
        return row
    if row.status == "committed":
        raise RunError(f"{phase} round {index} of {run_id} is committed; begin the next one")
    if (row.stage, row.weight_version_in) != (stage, weight_version_in):
        raise RunError(
            f"{phase} round {index} of {run_id} began in stage {row.stage} with weight version "
            f"{row.weight_version_in}, now stage {stage} and version {weight_version_in}; restore "
            "the run before going on"
        )
    return row


def get(session: Session, run_id: str, phase: str, index: int) -> RoundRow:
    row = session.get(RoundRow, (run_id, phase, index))
    if row is None:
        raise RunError(f"{phase} round {index} of {run_id} was never begun; call begin_round first")
    return row


def advance(session: Session, run_id: str, phase: str, index: int, status: str) -> None:
    """Move on to ``status``; a round that is further already stays there."""
    if status not in ROUND_STATUSES or status == "committed":
        raise RunError(
            f"round status {status!r} is not one of {', '.join(ROUND_STATUSES[:-1])}; a round is "
            "committed by commit_round"
        )
    row = get(session, run_id, phase, index)
    row.status = max(row.status, status, key=ROUND_STATUSES.index)


def commit(session: Session, run_id: str, commit: RoundCommit) -> None:
    """Everything a round decided, at once; repeating the same commit changes nothing."""
    row = get(session, run_id, commit.phase, commit.index)
    if row.status == "committed":
        _check_same(session, run_id, row, commit)
        return
    _settle_episodes(session, run_id, commit)
    now = time.time()
    session.add(
        WeightVersionRow(
            run_id=run_id,
            version=commit.weight_version,
            checksum=commit.weight_checksum,
            path=commit.weight_path,
            round_index=commit.index,
        )
    )
    _add_type_stats(session, run_id, commit)
    add_events(session, run_id, commit.events)
    row.status = "committed"
    row.weight_version_out = commit.weight_version
    row.checkpoint_path = commit.checkpoint_path
    row.checkpoint_hash = commit.checkpoint_hash
    row.metrics_json = dict(commit.metrics)
    row.finished_at = now


def commit_eval(
    session: Session, run_id: str, phase: str, index: int, metrics: dict[str, object]
) -> None:
    """Close an evaluation: no weights, and its episodes stay finished. Repeatable."""
    row = get(session, run_id, phase, index)
    if row.status == "committed":
        return
    open_ids = _ids_in(session, run_id, phase, index, "issued", "running")
    if open_ids:
        raise RunError(
            f"{phase} round {index} has {len(open_ids)} episodes that are not finished "
            f"({open_ids[0]}...); collect them before the commit"
        )
    row.status, row.metrics_json, row.finished_at = "committed", metrics, time.time()


def _settle_episodes(session: Session, run_id: str, commit: RoundCommit) -> None:
    where = episodes.in_round(run_id, commit.phase, commit.index)
    episodes.drop(session, dict(commit.dropped))
    session.execute(
        update(EpisodeRow)
        .where(where, EpisodeRow.state == "scored")
        .values(state="trained")
        .execution_options(synchronize_session=False)
    )
    left = _ids_in(session, run_id, commit.phase, commit.index, "issued", "running", "finished")
    if left:
        raise RunError(
            f"{commit.phase} round {commit.index} has {len(left)} episodes that are neither scored "
            f"nor dropped ({left[0]}...); score or drop them before the commit"
        )


def _ids_in(session: Session, run_id: str, phase: str, index: int, *states: str) -> list[str]:
    return list(
        session.scalars(
            select(EpisodeRow.id)
            .where(episodes.in_round(run_id, phase, index), EpisodeRow.state.in_(states))
            .order_by(EpisodeRow.id)
        )
    )


def _check_same(session: Session, run_id: str, row: RoundRow, commit: RoundCommit) -> None:
    version = session.get(WeightVersionRow, (run_id, commit.weight_version))
    if version is None or row.weight_version_out != commit.weight_version:
        stored = f"weight version {row.weight_version_out}"
    elif version.checksum != commit.weight_checksum:
        stored = f"checksum {version.checksum[:12]}"
    else:
        return
    raise RunError(
        f"{commit.phase} round {commit.index} of {run_id} is committed with {stored}, now version "
        f"{commit.weight_version} with checksum {commit.weight_checksum[:12]}; a commit is final"
    )


def _add_type_stats(session: Session, run_id: str, commit: RoundCommit) -> None:
    session.add_all(
        TaskTypeStatsRow(
            run_id=run_id,
            round_index=commit.index,
            task_type=stats.task_type,
            num_episodes=stats.num_episodes,
            num_scored=stats.num_scored,
            num_correct=stats.num_correct,
            mean_tokens=stats.mean_tokens,
            tokens_per_solved=stats.tokens_per_solved,
            gate_open=stats.gate_open,
            metrics_json=dict(stats.metrics),
        )
        for stats in commit.type_stats
    )


def add_events(session: Session, run_id: str, events: Sequence[LedgerEvent]) -> None:
    """In the order given."""
    rows = [
        {
            "run_id": run_id,
            "round_index": event.round_index,
            "task_index": event.task_index,
            "sample": event.sample,
            "kind": event.kind,
            "key": event.key,
            "data_json": dict(event.data),
        }
        for event in events
    ]
    if rows:
        session.execute(insert(EventRow), rows)


def info(row: RoundRow) -> RoundInfo:
    return RoundInfo(
        phase=row.phase,
        index=row.index,
        status=row.status,
        stage=row.stage,
        weight_version_in=row.weight_version_in,
        weight_version_out=row.weight_version_out,
        checkpoint_path=row.checkpoint_path,
        checkpoint_hash=row.checkpoint_hash,
        metrics=dict(row.metrics_json),
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def event_info(row: EventRow) -> LedgerEvent:
    return LedgerEvent(
        kind=row.kind,
        round_index=row.round_index,
        key=row.key,
        data=dict(row.data_json),
        task_index=row.task_index,
        sample=row.sample,
        id=row.id,
        created_at=row.created_at,
    )
