"""Domain objects <-> ledger rows. Every state change of an episode is one transaction."""

from parl.store.store import Store
from parl.store.values import (
    Audit,
    EpisodeView,
    LedgerEvent,
    RoundCommit,
    RoundInfo,
    RunInfo,
    TypeStats,
)

__all__ = [
    "Audit",
    "EpisodeView",
    "LedgerEvent",
    "RoundCommit",
    "RoundInfo",
    "RunInfo",
    "Store",
    "TypeStats",
]
