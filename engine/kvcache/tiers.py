"""Which tier a block is in: pure functions of its position and the context length.

t is a query's context length, its position + 1. Blocks have 32 tokens. Block 0, the sink, is never
coded: a handful of first tokens hold a quarter of all attention (facts/kv-attention.md 0.6).

    0      32           cold_end(t)        warm_end(t)        t
    | full | cold       | warm             | full (hot)       |
"""

from __future__ import annotations

from enum import IntEnum

from engine.kvcache.config import BLOCK, TierConfig


class Tier(IntEnum):
    """Where a block is at a step boundary."""

    ABSENT = 0
    """Not computed, evicted, or lost."""
    FULL = 1
    WARM = 2
    COLD = 3


class State(IntEnum):
    """A block's way through the tiers. Full precision, codes and a cold record are readable in
    HOT, WARM and COLD_*; the others are on their way and become the next at a step boundary."""

    ABSENT = 0
    HOT = 1
    QUANTISING = 2
    WARM = 3
    SPILLING = 4
    COLD_HOST = 5
    COLD_DISK = 6
    LOADING = 7


MOVES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.ABSENT, State.HOT),
        (State.HOT, State.QUANTISING),
        (State.QUANTISING, State.HOT),  # the step failed
        (State.QUANTISING, State.WARM),
        (State.WARM, State.SPILLING),
        (State.SPILLING, State.WARM),  # wanted again before it left, or no room below
        (State.SPILLING, State.COLD_HOST),
        (State.SPILLING, State.COLD_DISK),
        (State.COLD_HOST, State.COLD_DISK),
        (State.COLD_HOST, State.LOADING),
        (State.COLD_DISK, State.LOADING),
        (State.LOADING, State.WARM),
        (State.LOADING, State.COLD_HOST),  # no room on the device
        (State.LOADING, State.COLD_DISK),
    }
)
"""Besides these, every state may end in ABSENT: released, evicted, or corrupt."""


def is_warm(block: int, t: int, hot: int) -> bool:
    """Whether ``block`` has left full precision for a query of context length t."""
    return block >= 1 and BLOCK * (block + 1) <= t - hot


def warm_end(t: int, config: TierConfig) -> int:
    """First block after the sink that is in full precision."""
    return 1 if config.profile == "full" else max(1, (t - config.hot) // BLOCK)


def cold_end(t: int, config: TierConfig) -> int:
    """First block after the sink that is not cold."""
    return 1 if config.cold == "off" else max(1, warm_end(t, config) - config.warm // BLOCK)


def tier_of(block: int, t: int, config: TierConfig) -> Tier:
    """Tier of ``block`` at context length t; ABSENT when t ends before it."""
    if BLOCK * block >= t:
        return Tier.ABSENT
    if not 1 <= block < warm_end(t, config):
        return Tier.FULL
    return Tier.WARM if block >= cold_end(t, config) else Tier.COLD
