"""Who waits for whom in a live run: workers' wait files, their processes, leases of the ledger."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import ConfigError

if TYPE_CHECKING:
    from infra.db.engine import Ledger

STALE_AFTER_S = 5.0
"""A worker writes its waits every second; older than this, its process hangs or is gone."""
LONGEST = 8


@dataclass(frozen=True, slots=True)
class OpenWait:
    owner: str
    what: str
    for_s: float
    left_s: float
    """Until the deadline; negative = it should have ended."""


@dataclass(frozen=True, slots=True)
class WorkerWaits:
    """One waits-*.json. ``state``: "alive", "hangs" (its file is stale) or "gone" (no process)."""

    worker: str
    pid: int
    state: str
    written_s_ago: float
    waits: tuple[OpenWait, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    kind: str
    ref: str
    owner: str
    owner_dead: bool
    left_s: float
    data: dict[str, Any]


def read_waits(run_dir: Path, now: float | None = None) -> list[WorkerWaits]:
    """Every worker of the run on this host. ConfigError when a file is no wait file."""
    now = time.time() if now is None else now
    return [_read(path, now) for path in sorted(run_dir.glob("waits-*.json"))]


def _read(path: Path, now: float) -> WorkerWaits:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        age = now - data["written_at"]
        alive = process_alive(data["pid"])
        waits = tuple(
            OpenWait(w["owner"], w["what"], now - w["since"], w["deadline"] - now)
            for w in data["waits"]
        )
        worker, pid = data["worker"], data["pid"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a wait file ({error!r}); delete it") from error
    state = "gone" if not alive else "hangs" if waits and age > STALE_AFTER_S else "alive"
    return WorkerWaits(worker, pid, state, age, waits)


def read_leases(ledger: Ledger, now: float | None = None) -> list[Lease]:
    """Everything external somebody answers for, the soonest deadline first."""
    from sqlalchemy import select

    from infra.db.models import LeaseRow
    from infra.leases import is_dead

    now = time.time() if now is None else now
    with ledger.session() as session:
        rows = session.scalars(select(LeaseRow).order_by(LeaseRow.deadline)).all()
    return [
        Lease(r.kind, r.ref, r.owner, is_dead(r.owner), r.deadline - now, r.data_json) for r in rows
    ]


def process_alive(pid: int) -> bool:
    """Whether a process of this host has the id; a zombie counts as gone."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
    return status.rpartition(")")[2].split()[0] != "Z"


def waits_text(workers: list[WorkerWaits], leases: list[Lease]) -> list[str]:
    """Lines: one a worker, below it what its waits are for and the longest ones."""
    lines = [] if workers else ["no worker has written a wait file yet"]
    for worker in workers:
        lines.append(
            f"{worker.worker}  pid {worker.pid} {worker.state}, {len(worker.waits)} waits, "
            f"written {worker.written_s_ago:.1f} s ago"
        )
        kinds = Counter(wait.what for wait in worker.waits)
        lines += [f"  {count:>5} wait for {what}" for what, count in kinds.most_common()]
        for wait in sorted(worker.waits, key=lambda w: -w.for_s)[:LONGEST]:
            late = (
                f"LATE by {-wait.left_s:.1f} s" if wait.left_s < 0 else f"{wait.left_s:.1f} s left"
            )
            lines.append(f"  {wait.for_s:>7.1f} s  {wait.owner} for {wait.what} ({late})")
    kinds = Counter((lease.kind, lease.owner, lease.owner_dead) for lease in leases)
    for (kind, owner, dead), count in kinds.items():
        state = "DEAD, the next resume reaps them" if dead else "alive"
        lines.append(f"lease  {count} x {kind} held by {owner} ({state})")
    overdue = [lease for lease in leases if lease.left_s < 0]
    lines += [
        f"lease  OVERDUE {lease.kind} {lease.ref} by {-lease.left_s:.0f} s"
        for lease in overdue[:LONGEST]
    ]
    return lines
