"""Pids of a run's parts, from what the run itself recorded."""

from __future__ import annotations

from infra.db.engine import Ledger
from parl.bench.run_trace import box_ids, box_processes


def box_pids(ledger: Ledger) -> list[int]:
    """Every process of every sandbox that holds a lease now."""
    return box_processes(box_ids(ledger))
