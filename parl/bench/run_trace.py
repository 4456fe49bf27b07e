"""What two runs must agree on bit for bit, and what a run must not leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from infra.db.engine import Ledger
from infra.db.models import EpisodeRow, LeaseRow, RoundRow, WeightVersionRow
from sandbox.shelf import LEASE_KIND


@dataclass(frozen=True, slots=True)
class RunTrace:
    """Committed facts by "phase/round". Floats are compared exactly: ``==``, no tolerance."""

    numbers: dict[str, tuple[float, float]]
    """(loss, grad_norm) of rounds that trained."""
    rewards: dict[str, tuple[float | None, ...]]
    """By task and sample; None = no reward."""
    checksums: dict[int, str]
    """Of each published weight version."""


def read_trace(ledger: Ledger, run_id: str) -> RunTrace:
    with ledger.session() as session:
        rounds = session.scalars(
            select(RoundRow).where(RoundRow.run_id == run_id, RoundRow.status == "committed")
        ).all()
        episodes = session.execute(
            select(EpisodeRow.phase, EpisodeRow.round_index, EpisodeRow.reward)
            .where(EpisodeRow.run_id == run_id)
            .order_by(EpisodeRow.task_index, EpisodeRow.sample)
        ).all()
        versions = session.scalars(
            select(WeightVersionRow).where(WeightVersionRow.run_id == run_id)
        ).all()
    rewards: dict[str, list[float | None]] = {}
    for phase, index, reward in episodes:
        rewards.setdefault(f"{phase}/{index}", []).append(reward)
    return RunTrace(
        numbers={
            f"{row.phase}/{row.index}": (row.metrics_json["loss"], row.metrics_json["grad_norm"])
            for row in rounds
            if row.phase == "train"
        },
        rewards={key: tuple(values) for key, values in rewards.items()},
        checksums={row.version: row.checksum for row in versions},
    )


def differences(expected: RunTrace, found: RunTrace) -> list[str]:
    """Where the second run is not the first; empty = bit-identical."""
    result = []
    for name in ("numbers", "rewards", "checksums"):
        ours: dict[Any, Any] = getattr(expected, name)
        theirs: dict[Any, Any] = getattr(found, name)
        for key in sorted(ours.keys() | theirs.keys(), key=str):
            if ours.get(key) != theirs.get(key):
                result.append(
                    f"{name} of {key}: {_short(theirs.get(key))} != {_short(ours.get(key))}"
                )
    return result


def box_ids(ledger: Ledger) -> set[str]:
    """Names of the sandboxes that hold a lease now."""
    with ledger.session() as session:
        return set(session.scalars(select(LeaseRow.ref).where(LeaseRow.kind == LEASE_KIND)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
