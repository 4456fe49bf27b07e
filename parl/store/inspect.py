"""Questions to the ledger: what is lost, what is there twice, what happened to one episode."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from infra.db.models import EpisodeRow, EventRow, RewardPartRow, RoundRow, TaskRow
from parl.store import episodes, rounds
from parl.store.transitions import TO_RUN
from parl.store.values import Audit, EpisodeView
from reward_models.episode import RewardBreakdown


def counts(session: Session, run_id: str, phase: str | None, index: int | None) -> dict[str, int]:
    """Episodes by state."""
    query = select(EpisodeRow.state, func.count()).where(EpisodeRow.run_id == run_id)
    if phase is not None:
        query = query.where(EpisodeRow.phase == phase)
    if index is not None:
        query = query.where(EpisodeRow.round_index == index)
    rows = session.execute(query.group_by(EpisodeRow.state)).all()
    return dict(sorted(row.tuple() for row in rows))


def failures(session: Session, run_id: str) -> dict[str, int]:
    """Episodes that the infrastructure failed, by kind; one that failed again counts again."""
    rows = session.scalars(
        select(EventRow.data_json).where(
            EventRow.run_id == run_id, EventRow.kind == episodes.FAILURE_EVENT
        )
    )
    return dict(sorted(Counter(data["failure"] for data in rows).items()))


def audit(session: Session, run_id: str, stuck_after_s: float) -> Audit:
    """Look through all episodes of a run; see ``Audit``."""
    rows = session.execute(
        select(
            EpisodeRow.id,
            EpisodeRow.phase,
            EpisodeRow.round_index,
            EpisodeRow.task_index,
            EpisodeRow.sample,
            EpisodeRow.state,
            EpisodeRow.attempt,
            EpisodeRow.draw_json,
            EpisodeRow.updated_at,
        ).where(EpisodeRow.run_id == run_id)
    ).all()
    committed = {
        row.tuple()
        for row in session.execute(
            select(RoundRow.phase, RoundRow.index).where(
                RoundRow.run_id == run_id, RoundRow.status == "committed"
            )
        )
    }
    present: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    draws: dict[tuple[str, str], list[str]] = defaultdict(list)
    stuck: list[str] = []
    stale = time.time() - stuck_after_s
    for row in rows:
        place = (row.phase, row.round_index)
        present[place].add((row.task_index, row.sample))
        draws[row.phase, json.dumps(row.draw_json, sort_keys=True)].append(row.id)
        open_states = TO_RUN | {"finished", "scored"}
        if row.phase.startswith("eval:"):
            open_states = TO_RUN  # an evaluation's episodes end as finished
        in_committed = place in committed and row.state in open_states
        if in_committed or (row.state == "running" and row.updated_at < stale):
            stuck.append(row.id)
    missing = [
        f"{run_id}/{phase}/{index:05d}/{task:05d}/{sample:03d}"
        for (phase, index), found in present.items()
        for task in range(max(t for t, _ in found) + 1)
        for sample in range(max(s for _, s in found) + 1)
        if (task, sample) not in found
    ]
    return Audit(
        missing=sorted(missing),
        duplicated=sorted(i for ids in draws.values() if len(ids) > 1 for i in ids),
        stuck=sorted(stuck),
        counts=dict(sorted(Counter(row.state for row in rows).items())),
        attempts=sum(max(0, row.attempt - 1) for row in rows),
    )


def show(session: Session, episode_id: str) -> EpisodeView:
    """Everything about one episode."""
    row = episodes.get(session, episode_id)
    task = None if row.task_id is None else session.get(TaskRow, row.task_id)
    parts = session.execute(
        select(RewardPartRow.name, RewardPartRow.value)
        .where(RewardPartRow.episode_id == episode_id)
        .order_by(RewardPartRow.name)
    )
    reward = None
    if row.formula_version is not None:
        reward = RewardBreakdown(
            total=row.reward,
            parts=dict(part.tuple() for part in parts),
            reasons=tuple(row.reward_reasons_json),
            formula_version=row.formula_version,
        )
    events = session.scalars(
        select(EventRow)
        .where(EventRow.run_id == row.run_id, EventRow.key == episode_id)
        .order_by(EventRow.id)
    )
    return EpisodeView(
        episode_id=row.id,
        state=row.state,
        drop_reason=row.drop_reason,
        attempt=row.attempt,
        worker=row.worker,
        task_id=row.task_id,
        task_spec={} if task is None else dict(task.spec_json),
        budget=row.budget,
        stage=row.stage,
        weight_version=row.weight_version,
        trajectory=None if row.outcome is None else episodes.load_one(session, row),
        reward=reward,
        events=[rounds.event_info(event) for event in events],
    )
