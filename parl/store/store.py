"""Store: the ledger of one run, in domain objects. Each method is one transaction or one snapshot.

Safe to share between threads and to pickle (it travels as the ledger's URL). Errors: RunError for
an illegal state change, infra.errors.LedgerError when the database fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select

from infra.db.engine import Ledger
from infra.db.models import EventRow, RoundRow, RunRow, TaskTypeStatsRow, WeightVersionRow
from parl.errors import RunError
from parl.rollout.jobs import EpisodeJob
from parl.store import episodes, inspect, rounds
from parl.store.values import (
    Audit,
    EpisodeView,
    LedgerEvent,
    RoundCommit,
    RoundInfo,
    RunInfo,
    TypeStats,
)
from parl.trajectory import Trajectory
from reward_models.episode import RewardBreakdown


class Store:
    """Reads and writes one run."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._ledger = ledger
        self.run_id = run_id

    # -- run ------------------------------------------------------------------------------------

    def create_run(
        self,
        *,
        name: str,
        kind: str,
        seed: int,
        config: Mapping[str, Any],
        config_hash: str = "",
        code_commit: str = "",
        run_dir: str = "",
    ) -> RunInfo:
        """Insert the run as ``created``. RunError when the id is taken."""

        def write(session):
            if session.get(RunRow, self.run_id) is not None:
                raise RunError(
                    f"run {self.run_id} exists already; resume it with `parl rl resume`, or start "
                    "one under another name"
                )
            row = RunRow(
                id=self.run_id,
                name=name,
                kind=kind,
                status="created",
                seed=seed,
                config_json=dict(config),
                config_hash=config_hash,
                code_commit=code_commit,
                run_dir=run_dir,
            )
            session.add(row)
            session.flush()
            return _run_info(row)

        return self._ledger.run(write)

    def load_run(self) -> RunInfo:
        """RunError when there is no such run."""
        with self._ledger.session() as session:
            return _run_info(self._run_row(session))

    def run_status(self) -> str:
        """running | finished | failed | stopped."""
        with self._ledger.session() as session:
            return self._run_row(session).status

    def set_run_status(self, status: str, error: str | None = None) -> None:
        """running | finished | failed | stopped; ``error`` = one line."""

        def write(session):
            row = self._run_row(session)
            row.status, row.error = status, error

        self._ledger.run(write)

    def _run_row(self, session) -> RunRow:
        row = session.get(RunRow, self.run_id)
        if row is None:
            raise RunError(
                f"run {self.run_id} is not in the ledger; `parl rl list` shows the runs there are"
            )
        return row

    # -- rounds ---------------------------------------------------------------------------------

    def begin_round(
        self, phase: str, index: int, *, stage: int, weight_version_in: int
    ) -> RoundInfo:
        """Open a round, or find the one a crash left open. RunError when it is committed or began
        with another stage or weight version."""
        return self._ledger.run(
            lambda session: rounds.info(
                rounds.begin(session, self.run_id, phase, index, stage, weight_version_in)
            )
        )

    def set_round_status(self, phase: str, index: int, status: str) -> None:
        """issued -> collected -> scored -> trained; never back."""
        self._ledger.run(lambda session: rounds.advance(session, self.run_id, phase, index, status))

    def commit_round(self, commit: RoundCommit) -> None:
        """The one commit point: weight version, statistics, events, checkpoint, and every scored
        episode trained or dropped, in one transaction. The same commit again is a no-op."""
        self._ledger.run(lambda session: rounds.commit(session, self.run_id, commit))

    def commit_eval(
        self, phase: str, index: int, weight_version: int, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Close an evaluation round whose episodes are all finished."""
        data = {"weight_version": weight_version, **(metrics or {})}
        self._ledger.run(
            lambda session: rounds.commit_eval(session, self.run_id, phase, index, data)
        )

    def rounds(self, phase: str | None = None) -> list[RoundInfo]:
        """All rounds, in order of their start."""
        query = select(RoundRow).where(RoundRow.run_id == self.run_id)
        if phase is not None:
            query = query.where(RoundRow.phase == phase)
        with self._ledger.session() as session:
            rows = session.scalars(query.order_by(RoundRow.started_at, RoundRow.index))
            return [rounds.info(row) for row in rows]

    def committed_rounds(self) -> list[RoundInfo]:
        """Rounds that published weights (warm start and training), oldest version first."""
        with self._ledger.session() as session:
            rows = session.scalars(
                select(RoundRow)
                .where(
                    RoundRow.run_id == self.run_id,
                    RoundRow.status == "committed",
                    RoundRow.weight_version_out.is_not(None),
                )
                .order_by(RoundRow.weight_version_out)
            )
            return [rounds.info(row) for row in rows]

    def last_committed_round(self, phase: str = "train") -> RoundInfo | None:
        """The newest committed round of a phase."""
        done = [r for r in self.rounds(phase) if r.status == "committed"]
        return max(done, key=lambda r: r.index, default=None)

    def is_committed(self, phase: str, index: int) -> bool:
        with self._ledger.session() as session:
            row = session.get(RoundRow, (self.run_id, phase, index))
            return row is not None and row.status == "committed"

    def round_version(self, phase: str, index: int) -> int | None:
        """Weight version a round began with; None when it was never begun."""
        with self._ledger.session() as session:
            row = session.get(RoundRow, (self.run_id, phase, index))
            return None if row is None else row.weight_version_in

    def weight_checksum(self, version: int) -> str:
        """Checksum of a committed weight version; RunError when there is none."""
        with self._ledger.session() as session:
            row = session.get(WeightVersionRow, (self.run_id, version))
            if row is None:
                raise RunError(
                    f"run {self.run_id} has no weight version {version}; expected one that a round "
                    "committed"
                )
            return row.checksum

    def type_stats(self, index: int | None = None) -> dict[int, list[TypeStats]]:
        """Committed statistics by round, task types in name order."""
        query = select(TaskTypeStatsRow).where(TaskTypeStatsRow.run_id == self.run_id)
        if index is not None:
            query = query.where(TaskTypeStatsRow.round_index == index)
        result: dict[int, list[TypeStats]] = {}
        with self._ledger.session() as session:
            for row in session.scalars(
                query.order_by(TaskTypeStatsRow.round_index, TaskTypeStatsRow.task_type)
            ):
                result.setdefault(row.round_index, []).append(_type_stats(row))
        return result

    # -- episodes -------------------------------------------------------------------------------

    def issue(self, jobs: Sequence[EpisodeJob]) -> list[EpisodeJob]:
        """Insert new episodes and return those still to run (issued or running), in the order
        given; repeatable. RunError when an episode's draw changed."""
        return self._ledger.run(lambda session: episodes.issue(session, jobs))

    def mark_running(self, episode_id: str, worker: str, reason: str = "") -> int:
        """A (further) attempt begins; returns its number. A repeat leaves an event."""
        return self._ledger.run(
            lambda session: episodes.mark_running(session, episode_id, worker, reason)
        )

    def finish(self, trajectory: Trajectory) -> None:
        """Episode, turns and calls in one transaction. The same content again is a no-op; other
        tokens or another verdict raise RunError."""
        self._ledger.run(lambda session: episodes.finish(session, trajectory))

    def reopen_failed(self, phase: str, index: int) -> list[str]:
        """Episodes that ended as infra_error or cancelled become issued again; returns ids."""
        return self._ledger.run(
            lambda session: episodes.reopen_failed(session, self.run_id, phase, index)
        )

    def score(
        self, scores: Sequence[tuple[str, RewardBreakdown]], *, stage: int | None = None
    ) -> None:
        """Rewards of one round in one transaction; repeatable until the commit."""
        self._ledger.run(lambda session: episodes.score(session, scores, stage))

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Episode id -> why it will never be trained on."""
        self._ledger.run(lambda session: episodes.drop(session, dict(reasons)))

    def load_trajectories(self, phase: str, index: int) -> list[Trajectory]:
        """Every finished episode of a round, sorted by (task, sample), arrays bit for bit."""
        with self._ledger.session() as session:
            return episodes.load_round(session, self.run_id, phase, index)

    # -- events and questions -------------------------------------------------------------------

    def add_events(self, events: Sequence[LedgerEvent]) -> None:
        """Outside a commit: incidents, not decisions of a round."""
        self._ledger.run(lambda session: rounds.add_events(session, self.run_id, list(events)))

    def events(self, kind: str | None = None, key: str | None = None) -> list[LedgerEvent]:
        """In order of (round, task, sample), then of writing."""
        query = select(EventRow).where(EventRow.run_id == self.run_id)
        if kind is not None:
            query = query.where(EventRow.kind == kind)
        if key is not None:
            query = query.where(EventRow.key == key)
        query = query.order_by(
            EventRow.round_index,
            func.coalesce(EventRow.task_index, -1),
            func.coalesce(EventRow.sample, -1),
            EventRow.id,
        )
        with self._ledger.session() as session:
            return [rounds.event_info(row) for row in session.scalars(query)]

    def counts(self, phase: str | None = None, index: int | None = None) -> dict[str, int]:
        """Episodes by state."""
        with self._ledger.session() as session:
            return inspect.counts(session, self.run_id, phase, index)

    def failures(self) -> dict[str, int]:
        """Episodes that ended without a reward for the infrastructure's reasons, by kind
        (parl.rollout.failures). Of the whole run; one that was reopened stays counted."""
        with self._ledger.session() as session:
            return inspect.failures(session, self.run_id)

    def audit(self, stuck_after_s: float = 3600.0) -> Audit:
        """Missing, duplicated and stuck episodes of the run."""
        with self._ledger.session() as session:
            return inspect.audit(session, self.run_id, stuck_after_s)

    def show(self, episode_id: str) -> EpisodeView:
        """Everything about one episode; RunError when it is unknown."""
        with self._ledger.session() as session:
            return inspect.show(session, episode_id)


def _run_info(row: RunRow) -> RunInfo:
    return RunInfo(
        run_id=row.id,
        name=row.name,
        kind=row.kind,
        status=row.status,
        seed=row.seed,
        config=dict(row.config_json),
        config_hash=row.config_hash,
        code_commit=row.code_commit,
        run_dir=row.run_dir,
        error=row.error,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _type_stats(row: TaskTypeStatsRow) -> TypeStats:
    return TypeStats(
        task_type=row.task_type,
        num_episodes=row.num_episodes,
        num_scored=row.num_scored,
        num_correct=row.num_correct,
        mean_tokens=row.mean_tokens,
        tokens_per_solved=row.tokens_per_solved,
        gate_open=row.gate_open,
        metrics=dict(row.metrics_json),
    )
