"""A run as the ledger tells it: every figure, table and status line is drawn from a RunHistory."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from infra.db.engine import Ledger
from infra.db.models import (
    EpisodeRow,
    LeaseRow,
    RoundRow,
    RunRow,
    TaskTypeStatsRow,
    WeightVersionRow,
)
from infra.errors import LedgerError
from parl.rounds.reports import EvalReport, RoundReport

TRAIN = "train"
EVAL = "eval:"


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Committed rounds and evaluations in order, and what is still open. Times are epoch s."""

    run_id: str
    status: str
    seed: int
    config: dict[str, Any]
    code_commit: str
    run_dir: str
    error: str | None
    created_at: float
    updated_at: float
    rounds: tuple[RoundReport, ...]
    evals: dict[str, EvalReport]
    open_rounds: tuple[str, ...]
    """ "phase index (status)" of rounds that are not committed."""
    episode_states: dict[str, int]
    drop_reasons: dict[str, int]
    errors: dict[str, int]
    """Episodes by the first 120 characters of their error."""
    num_weight_versions: int
    num_leases: int
    """Leases in the whole ledger: they name things of any run that uses it."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """ "phase index" -> path, committed ones."""

    @property
    def task_types(self) -> list[str]:
        """Types seen in any committed round or evaluation, in name order."""
        names = {name for report in self.rounds for name in report.success}
        names |= {name for report in self.evals.values() for name in report.success_by_type}
        return sorted(names)

    @property
    def num_rounds(self) -> int:
        """Rounds the configuration asks for."""
        return int(self.config.get("rounds", {}).get("num_rounds", len(self.rounds)))

    def time_left(self) -> float | None:
        """Seconds to the last round at the rate of the last eight; None before the first."""
        recent = [r.seconds["total"] for r in self.rounds[-8:] if "total" in r.seconds]
        if not recent:
            return None
        return sum(recent) / len(recent) * (self.num_rounds - len(self.rounds))


@dataclass(frozen=True, slots=True)
class _Counts:
    """Sums over the scored episodes of one (phase, round, task type)."""

    task_type: str
    scored: int
    correctness: float
    solved: int
    tokens: int
    reward: float
    rewarded: int


def read_history(ledger: Ledger, run_id: str) -> RunHistory:
    """Read one run; LedgerError when the ledger does not know it."""
    with ledger.session() as session:
        run = session.get(RunRow, run_id)
        if run is None:
            known = session.scalars(select(RunRow.id).order_by(RunRow.created_at)).all()
            raise LedgerError(
                f"{ledger!r} holds no run {run_id!r}; it holds: {', '.join(known) or 'none'}"
            )
        rounds = session.scalars(
            select(RoundRow)
            .where(RoundRow.run_id == run_id)
            .order_by(RoundRow.started_at, RoundRow.index)
        ).all()
        counts = _counts(session, run_id)
        outcomes = _outcomes(session, run_id)
        committed = [row for row in rounds if row.status == "committed"]
        gates = _gates(session, run_id)
        num_rounds = int(run.config_json.get("rounds", {}).get("num_rounds", 0))
        return RunHistory(
            run_id=run_id,
            status=run.status,
            seed=run.seed,
            config=run.config_json,
            code_commit=run.code_commit,
            run_dir=run.run_dir,
            error=run.error,
            created_at=run.created_at,
            updated_at=run.updated_at,
            rounds=tuple(
                _round(row, num_rounds, counts[row.phase, row.index], gates, outcomes)
                for row in sorted(committed, key=lambda row: row.index)
                if row.phase == TRAIN
            ),
            evals={
                row.phase.removeprefix(EVAL): _eval(row, counts[row.phase, row.index], outcomes)
                for row in committed
                if row.phase.startswith(EVAL)
            },
            open_rounds=tuple(
                f"{row.phase} {row.index} ({row.status})"
                for row in rounds
                if row.status != "committed"
            ),
            episode_states=_count_by(session, run_id, EpisodeRow.state),
            drop_reasons=_count_by(session, run_id, EpisodeRow.drop_reason),
            errors=_count_by(session, run_id, func.substr(EpisodeRow.error, 1, 120)),
            num_weight_versions=_total(session, WeightVersionRow.version, run_id),
            num_leases=session.scalar(select(func.count()).select_from(LeaseRow)) or 0,
            checkpoints={
                f"{row.phase} {row.index}": row.checkpoint_path
                for row in committed
                if row.checkpoint_path is not None
            },
        )


def _counts(session: Session, run_id: str) -> dict[tuple[str, int], list[_Counts]]:
    scored = EpisodeRow.correctness.is_not(None)
    query = (
        select(
            EpisodeRow.phase,
            EpisodeRow.round_index,
            EpisodeRow.task_type,
            func.count(EpisodeRow.correctness),
            func.sum(EpisodeRow.correctness),
            func.sum(case((EpisodeRow.correctness == 1.0, 1), else_=0)),
            func.sum(case((scored, EpisodeRow.num_tokens), else_=0)),
            func.sum(EpisodeRow.reward),
            func.count(EpisodeRow.reward),
        )
        .where(EpisodeRow.run_id == run_id)
        .group_by(EpisodeRow.phase, EpisodeRow.round_index, EpisodeRow.task_type)
        .order_by(EpisodeRow.task_type)
    )
    found: dict[tuple[str, int], list[_Counts]] = defaultdict(list)
    for (
        phase,
        index,
        task_type,
        num,
        correctness,
        solved,
        tokens,
        reward,
        rewarded,
    ) in session.execute(query).tuples():
        counts = _Counts(
            task_type, num, correctness or 0.0, solved or 0, tokens or 0, reward or 0.0, rewarded
        )
        found[phase, index].append(counts)
    return found


def _outcomes(session: Session, run_id: str) -> dict[tuple[str, int], dict[str, int]]:
    query = (
        select(EpisodeRow.phase, EpisodeRow.round_index, EpisodeRow.outcome, func.count())
        .where(EpisodeRow.run_id == run_id, EpisodeRow.outcome.is_not(None))
        .group_by(EpisodeRow.phase, EpisodeRow.round_index, EpisodeRow.outcome)
    )
    found: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for phase, index, outcome, count in session.execute(query):
        found[phase, index][str(outcome)] = count
    return found


def _gates(session: Session, run_id: str) -> dict[int, dict[str, bool]]:
    """Round index -> task type -> gate after the round."""
    found: dict[int, dict[str, bool]] = defaultdict(dict)
    rows = session.scalars(select(TaskTypeStatsRow).where(TaskTypeStatsRow.run_id == run_id))
    for row in rows:
        found[row.round_index][row.task_type] = bool(row.gate_open)
    return found


def _round(
    row: RoundRow,
    num_rounds: int,
    counts: list[_Counts],
    gates: dict[int, dict[str, bool]],
    outcomes: dict[tuple[str, int], dict[str, int]],
) -> RoundReport:
    some = [c for c in counts if c.scored]
    rewarded = sum(c.rewarded for c in counts)
    numbers = {k: float(v) for k, v in row.metrics_json.items() if isinstance(v, int | float)}
    seconds = {}
    if row.finished_at is not None:
        seconds["total"] = row.finished_at - row.started_at
    return RoundReport(
        index=row.index,
        num_rounds=num_rounds,
        phase=row.phase,
        success={c.task_type: c.correctness / c.scored for c in some},
        mean_tokens={c.task_type: c.tokens / c.scored for c in some},
        tokens_per_solved={c.task_type: c.tokens / c.solved if c.solved else None for c in some},
        gate_open=gates.get(row.index, {}),
        stage=row.stage or 0,
        reward_mean=sum(c.reward for c in counts) / rewarded if rewarded else 0.0,
        metrics=numbers,
        outcomes=outcomes.get((row.phase, row.index), {}),
        seconds=seconds,
        weight_version=-1 if row.weight_version_out is None else row.weight_version_out,
    )


def _eval(
    row: RoundRow, counts: list[_Counts], outcomes: dict[tuple[str, int], dict[str, int]]
) -> EvalReport:
    some = [c for c in counts if c.scored]
    total = Counter()
    for c in some:
        total.update(scored=c.scored, tokens=c.tokens, solved=c.solved)
    scored, solved = total["scored"], total["solved"]
    version = row.weight_version_in if row.weight_version_out is None else row.weight_version_out
    return EvalReport(
        name=row.phase.removeprefix(EVAL),
        episodes=scored,
        success=sum(c.correctness for c in some) / scored if scored else 0.0,
        success_by_type={c.task_type: c.correctness / c.scored for c in some},
        mean_tokens=total["tokens"] / scored if scored else 0.0,
        mean_tokens_by_type={c.task_type: c.tokens / c.scored for c in some},
        tokens_per_solved=total["tokens"] / solved if solved else None,
        outcomes=outcomes.get((row.phase, row.index), {}),
        weight_version=-1 if version is None else version,
    )


def _count_by(session: Session, run_id: str, column: Any) -> dict[str, int]:
    """Episodes of the run by a column's value, null left out, most frequent first."""
    query = (
        select(column, func.count())
        .where(EpisodeRow.run_id == run_id, column.is_not(None))
        .group_by(column)
        .order_by(func.count().desc())
    )
    return {str(value): count for value, count in session.execute(query)}


def _total(session: Session, column: Any, run_id: str) -> int:
    query = select(func.count(column)).where(column.class_.run_id == run_id)
    return session.scalar(query) or 0
