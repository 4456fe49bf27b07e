"""Leases: who answers for a thing outside the ledger (sandbox, container, context, file).

The row is written before the thing exists and deleted after it is gone, so whatever a crash
leaves behind has a row. ``reap`` removes what nobody owns: the owner process is dead, or its
deadline passed (an owner on another machine; clocks should agree to a fraction of the ttl).

    lease = book.acquire("box", box_name, ttl_s=600, data={"pid": None})
    ...                                       # make it, use it; book.renew_all(600) now and then
    book.release(lease.id)
    book.reap({"box": remove_box})            # any process, any time, several at once
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy import Update, delete, select, update

from infra.db.engine import Ledger
from infra.db.models import LeaseRow
from infra.owners import LeaseError, is_dead, process_owner

__all__ = ["LeaseBook", "LeaseError", "ReapReport", "is_dead", "process_owner"]

Handler = Callable[[LeaseRow], None]
"""Removes what a lease names; must do nothing when it is already gone. Raises when it cannot."""

REAP_TTL_S = 120.0
"""A reaper owns the row this long while its handler works."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What ``reap`` did: rows removed, rows kept with the reason, kinds nobody handles."""

    removed: list[LeaseRow] = field(default_factory=list)
    failed: list[tuple[LeaseRow, str]] = field(default_factory=list)
    unhandled: list[LeaseRow] = field(default_factory=list)


class LeaseBook:
    """The leases of one owner, by default this process."""

    def __init__(self, ledger: Ledger, owner: str | None = None) -> None:
        self._ledger = ledger
        self.owner = owner or process_owner()

    def acquire(
        self, kind: str, ref: str, ttl_s: float, data: Mapping[str, Any] | None = None
    ) -> LeaseRow:
        """Write the row of ``(kind, ref)``; call this before making the thing.

        An own lease of the same name is renewed. LeaseError when another owner holds it, dead or
        alive: what a dead owner left must be reaped first.
        """
        now = time.time()
        with self._ledger.transaction() as session:
            named = select(LeaseRow).where(LeaseRow.kind == kind, LeaseRow.ref == ref)
            row = session.scalar(named.with_for_update())
            if row is None:
                row = LeaseRow(id=uuid.uuid4().hex, kind=kind, ref=ref, owner=self.owner)
                session.add(row)
            elif row.owner != self.owner:
                state = "dead, reap it first" if is_dead(row.owner) else "not known to be dead"
                raise LeaseError(f"lease {kind} {ref!r} is held by {row.owner} ({state})")
            row.data_json = dict(data or {})
            row.deadline = now + ttl_s
        return row

    @contextmanager
    def hold(
        self, kind: str, ref: str, ttl_s: float, data: Mapping[str, Any] | None = None
    ) -> Iterator[LeaseRow]:
        """``acquire`` for a block. Kept when the block raises: then the reaper looks after it."""
        row = self.acquire(kind, ref, ttl_s, data)
        yield row
        self.release(row.id)

    def renew(self, lease_id: str, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now. LeaseError when the lease is no longer ours."""
        mine = update(LeaseRow).where(LeaseRow.id == lease_id, LeaseRow.owner == self.owner)
        if not self._count(mine.values(deadline=time.time() + ttl_s)):
            raise LeaseError(
                f"lease {lease_id} is not held by {self.owner}: it was released, or its deadline "
                "passed and it was reaped; renew more often than its ttl"
            )

    def renew_all(self, ttl_s: float) -> int:
        """Renew every lease of this owner in one statement; returns how many."""
        mine = update(LeaseRow).where(LeaseRow.owner == self.owner)
        return self._count(mine.values(deadline=time.time() + ttl_s))

    def release(self, lease_id: str) -> None:
        """Delete the row; call this after the thing is gone. Twice is fine."""
        with self._ledger.transaction() as session:
            session.execute(
                delete(LeaseRow).where(LeaseRow.id == lease_id, LeaseRow.owner == self.owner)
            )

    def held(self) -> list[LeaseRow]:
        """Leases of this owner, oldest first."""
        query = select(LeaseRow).where(LeaseRow.owner == self.owner)
        with self._ledger.session() as session:
            return list(session.scalars(query.order_by(LeaseRow.created_at, LeaseRow.id)))

    def expired(self, now: float | None = None) -> list[LeaseRow]:
        """Leases that nobody owns: dead owner or deadline before ``now`` (epoch s)."""
        at = time.time() if now is None else now
        with self._ledger.session() as session:
            rows = session.scalars(select(LeaseRow).order_by(LeaseRow.created_at, LeaseRow.id))
            return [row for row in rows if row.deadline < at or is_dead(row.owner)]

    def reap(self, handlers: Mapping[str, Handler], now: float | None = None) -> ReapReport:
        """Remove what ``expired`` names, one handler a kind.

        A handler that raises keeps its row (for the next reap) and is reported, as is a kind
        without a handler. Of several reapers exactly one works on a row at a time.
        """
        report = ReapReport()
        for row in self.expired(now):
            handler = handlers.get(row.kind)
            if handler is None:
                report.unhandled.append(row)
            elif self._claim(row):
                self._remove(row, handler, report)
        return report

    def _count(self, change: Update) -> int:
        """Number of rows that ``change`` met."""
        with self._ledger.transaction() as session:
            return len(session.scalars(change.returning(LeaseRow.id)).all())

    def _claim(self, row: LeaseRow) -> bool:
        """Become the owner of a dead row, unless it was renewed or claimed since it was read."""
        unchanged = (
            LeaseRow.id == row.id,
            LeaseRow.owner == row.owner,
            LeaseRow.deadline == row.deadline,
        )
        claim = {"owner": f"{self.owner}#reaper", "deadline": time.time() + REAP_TTL_S}
        return self._count(update(LeaseRow).where(*unchanged).values(claim)) == 1

    def _remove(self, row: LeaseRow, handler: Handler, report: ReapReport) -> None:
        try:
            handler(row)
        except Exception as error:  # a handler may fail in any way; the others must still run
            reason = f"{type(error).__name__}: {error}"
            log.warning("lease_not_reaped", kind=row.kind, ref=row.ref, error=reason)
            report.failed.append((row, reason))
            change = update(LeaseRow).values(owner=row.owner, deadline=row.deadline)
        else:
            report.removed.append(row)
            change = delete(LeaseRow)
        with self._ledger.transaction() as session:
            session.execute(change.where(LeaseRow.id == row.id))
