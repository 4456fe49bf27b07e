"""State changes of episodes inside a transaction somebody else opened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from sqlalchemy import bindparam, delete, insert, select, update
from sqlalchemy.orm import Session

from infra.db.models import Base, EpisodeRow, EventRow, RewardPartRow, TaskRow, ToolCallRow, TurnRow
from parl.errors import RunError
from parl.rollout.jobs import EpisodeJob
from parl.store.codec import call_values, differences, episode_values, to_trajectory, turn_values
from parl.store.transitions import TO_RUN, check_transition
from parl.trajectory import Trajectory
from reward_models.episode import Outcome, RewardBreakdown
from sandbox.task import TaskSpec

FAILED = (Outcome.INFRA_ERROR, Outcome.CANCELLED)
FAILURE_EVENT = "infra_failure"
"""data: ``failure``, the kind (parl.rollout.failures), and ``error``."""
"""Outcomes that say nothing about the policy; such an episode may be reopened."""

# the two statements an episode costs are built once, and without the ORM: a round waits for them
_EPISODE = Base.metadata.tables["episode"]
_STATE = select(_EPISODE.c.state, _EPISODE.c.attempt, _EPISODE.c.worker, _EPISODE.c.outcome).where(
    _EPISODE.c.id == bindparam("key")
)
_CHANGE = update(_EPISODE).where(_EPISODE.c.id == bindparam("key"))
_ADD_TURNS = insert(Base.metadata.tables["turn"])
_ADD_CALLS = insert(Base.metadata.tables["tool_call"])


def in_round(run_id: str, phase: str, index: int):
    """WHERE clause of one round's episodes."""
    return (
        (EpisodeRow.run_id == run_id)
        & (EpisodeRow.phase == phase)
        & (EpisodeRow.round_index == index)
    )


def get(session: Session, episode_id: str) -> EpisodeRow:
    row = session.get(EpisodeRow, episode_id)
    if row is None:
        raise RunError(
            f"episode {episode_id} is not in the ledger; expected RUN/PHASE/ROUND/TASK/SAMPLE of "
            "an issued episode, see `parl rl status`"
        )
    return row


def issue(session: Session, jobs: Sequence[EpisodeJob]) -> list[EpisodeJob]:
    """Insert what is new; returns the jobs that still have to run, in the order given."""
    known: dict[str, tuple[str, dict[str, int]]] = {}
    for job in {(job.run_id, job.phase, job.round): job for job in jobs}.values():
        rows = session.execute(
            select(EpisodeRow.id, EpisodeRow.state, EpisodeRow.draw_json).where(
                in_round(job.run_id, job.phase, job.round)
            )
        )
        known.update({row.id: (row.state, row.draw_json) for row in rows})
    new = {job.episode_id: job for job in jobs if job.episode_id not in known}
    _add_tasks(session, {job.task.content_hash: job.task for job in new.values()})
    if new:
        session.execute(insert(EpisodeRow), [_issued(job) for job in new.values()])
    todo = []
    for job in jobs:
        state, draw = known.get(job.episode_id, ("issued", asdict(job.draw)))
        if draw != asdict(job.draw):
            raise RunError(
                f"episode {job.episode_id} was issued with draw {draw}, now with "
                f"{asdict(job.draw)}; a resumed run must keep its seed"
            )
        if state in TO_RUN:
            todo.append(job)
    return todo


def _issued(job: EpisodeJob) -> dict[str, object]:
    return {
        "id": job.episode_id,
        "run_id": job.run_id,
        "phase": job.phase,
        "round_index": job.round,
        "task_index": job.task_index,
        "sample": job.sample,
        "task_name": job.task.name,
        "task_type": job.task.task_type,
        "task_id": job.task.content_hash,
        "state": "issued",
        "budget": job.budget,
        "budget_units_json": dict(job.task.budget_units),
        "min_tokens": job.task.min_tokens,
        "max_tokens": job.limits.max_tokens,
        "stage": job.stage,
        "weight_version": job.weight_version,
        "draw_json": asdict(job.draw),
    }


def _add_tasks(session: Session, tasks: dict[str, TaskSpec]) -> None:
    if not tasks:
        return
    known = set(session.scalars(select(TaskRow.id).where(TaskRow.id.in_(tasks))))
    rows = [
        {"id": key, "name": task.name, "task_type": task.task_type, "spec_json": asdict(task)}
        for key, task in tasks.items()
        if key not in known
    ]
    if rows:
        session.execute(insert(TaskRow), rows)


def mark_running(session: Session, episode_id: str, worker: str, reason: str) -> int:
    """A (further) attempt; an event tells of every one after the first."""
    row = _state_of(session, episode_id)
    check_transition(episode_id, row.state, "running")
    attempt = row.attempt + 1
    change = {"state": "running", "attempt": attempt, "worker": worker}
    session.connection().execute(_CHANGE, {"key": episode_id, **change})
    if attempt > 1:
        data = {"attempt": attempt, "worker": worker, "before": row.worker, "reason": reason}
        session.add(_event(get(session, episode_id), "episode_reissued", data))
    return attempt


def finish(session: Session, trajectory: Trajectory) -> bool:
    """Write a finished episode; False when the ledger has it already.

    A second finish with other content raises RunError, unless it only reports a failure: a worker
    that was given up on may still say that it failed.
    """
    episode_id = trajectory.episode_id
    row = _state_of(session, episode_id)
    if row.outcome is not None:
        return _finished_again(session, get(session, episode_id), trajectory)
    check_transition(episode_id, row.state, "finished")
    connection = session.connection()
    change = {"state": "finished", **episode_values(trajectory)}
    connection.execute(_CHANGE, {"key": episode_id, **change})
    turns, calls = turn_values(trajectory), call_values(trajectory)
    if turns:
        connection.execute(_ADD_TURNS, turns)
    if calls:
        connection.execute(_ADD_CALLS, calls)
    if trajectory.failure is not None:
        # an event, for the episode may be reopened and end well
        data: dict[str, object] = {"failure": str(trajectory.failure), "error": trajectory.error}
        session.add(_event(get(session, episode_id), FAILURE_EVENT, data))
    return True


def _state_of(session: Session, episode_id: str):
    """state, attempt, worker and outcome of one episode."""
    row = session.connection().execute(_STATE, {"key": episode_id}).one_or_none()
    return get(session, episode_id) if row is None else row  # get raises and says so


def _finished_again(session: Session, row: EpisodeRow, trajectory: Trajectory) -> bool:
    if trajectory.outcome in FAILED and trajectory.outcome != row.outcome:
        data = {"outcome": str(trajectory.outcome), "error": trajectory.error}
        session.add(_event(row, "late_failure_ignored", data))
        return False
    found = differences(load_one(session, row), trajectory)
    if found and row.outcome not in FAILED:
        raise RunError(
            f"episode {row.id} is finished already and came back with other {', '.join(found)}; "
            "the same draws must give the same tokens: run the engine with deterministic=true"
        )
    return False


def reopen_failed(session: Session, run_id: str, phase: str, index: int) -> list[str]:
    """Episodes the infrastructure failed go back to issued; returns their ids."""
    rows = session.scalars(
        select(EpisodeRow).where(
            in_round(run_id, phase, index),
            EpisodeRow.outcome.in_(map(str, FAILED)),
            EpisodeRow.state == "finished",
        )
    ).all()
    for row in rows:
        session.add(_event(row, "episode_reopened", {"outcome": row.outcome, "error": row.error}))
        row.state, row.outcome, row.error, row.prompt_ids = "issued", None, None, None
        row.num_tokens = row.num_turns = row.num_calls = 0
    ids = [row.id for row in rows]
    for table in (TurnRow, ToolCallRow):
        session.execute(delete(table).where(table.episode_id.in_(ids)))
    return ids


def score(
    session: Session,
    scores: Iterable[tuple[str, RewardBreakdown]],
    stage: int | None,
) -> None:
    """Rewards of finished episodes; scoring an uncommitted round again replaces them."""
    parts: list[dict[str, object]] = []
    ids: list[str] = []
    changes: list[dict[str, object]] = []
    scores = list(scores)
    states = _states(session, [episode_id for episode_id, _ in scores])
    now = time.time()
    for episode_id, breakdown in scores:
        if episode_id not in states:
            get(session, episode_id)  # raises and says so
        check_transition(episode_id, states[episode_id], "scored")
        ids.append(episode_id)
        changes.append(
            {
                "id": episode_id,
                "state": "scored",
                "reward": breakdown.total,
                "reward_reasons_json": list(breakdown.reasons),
                "formula_version": breakdown.formula_version,
                "updated_at": now,
                **({} if stage is None else {"stage": stage}),
            }
        )
        parts += [
            {"episode_id": episode_id, "name": name, "value": value}
            for name, value in breakdown.parts.items()
        ]
    if changes:
        session.execute(update(EpisodeRow), changes)
        session.execute(delete(RewardPartRow).where(RewardPartRow.episode_id.in_(ids)))
    if parts:
        session.execute(insert(RewardPartRow), parts)


def drop(session: Session, reasons: dict[str, str]) -> None:
    """Take episodes out for good, each with its reason; one that is out already keeps its own."""
    states = _states(session, list(reasons))
    for episode_id, reason in reasons.items():
        if episode_id not in states:
            get(session, episode_id)
        if states[episode_id] == "dropped":
            continue
        check_transition(episode_id, states[episode_id], "dropped")
        session.execute(
            update(EpisodeRow)
            .where(EpisodeRow.id == episode_id)
            .values(state="dropped", drop_reason=reason)
            .execution_options(synchronize_session=False)
        )


def _states(session: Session, ids: list[str]) -> dict[str, str]:
    rows = session.execute(select(EpisodeRow.id, EpisodeRow.state).where(EpisodeRow.id.in_(ids)))
    return {row.id: row.state for row in rows}


def load_one(session: Session, row: EpisodeRow) -> Trajectory:
    turns = session.scalars(
        select(TurnRow).where(TurnRow.episode_id == row.id).order_by(TurnRow.index)
    ).all()
    calls = session.scalars(
        select(ToolCallRow)
        .where(ToolCallRow.episode_id == row.id)
        .order_by(ToolCallRow.turn, ToolCallRow.index)
    ).all()
    return to_trajectory(row, turns, calls)


def load_round(session: Session, run_id: str, phase: str, index: int) -> list[Trajectory]:
    """Finished episodes of a round (whatever became of them), sorted by (task, sample)."""
    where = in_round(run_id, phase, index)
    rows = session.scalars(
        select(EpisodeRow)
        .where(where, EpisodeRow.outcome.is_not(None))
        .order_by(EpisodeRow.task_index, EpisodeRow.sample)
    ).all()
    turns: dict[str, list[TurnRow]] = {}
    for turn in session.scalars(
        select(TurnRow).join(EpisodeRow).where(where).order_by(TurnRow.episode_id, TurnRow.index)
    ):
        turns.setdefault(turn.episode_id, []).append(turn)
    calls: dict[str, list[ToolCallRow]] = {}
    for call in session.scalars(
        select(ToolCallRow)
        .join(EpisodeRow)
        .where(where)
        .order_by(ToolCallRow.episode_id, ToolCallRow.turn, ToolCallRow.index)
    ):
        calls.setdefault(call.episode_id, []).append(call)
    return [to_trajectory(row, turns.get(row.id, []), calls.get(row.id, [])) for row in rows]


def _event(row: EpisodeRow, kind: str, data: dict[str, object]) -> EventRow:
    return EventRow(
        run_id=row.run_id,
        round_index=row.round_index,
        task_index=row.task_index,
        sample=row.sample,
        kind=kind,
        key=row.id,
        data_json=data,
    )
