"""ContextBlocks: which blocks one context has, in which state, and where. No tensors, no locks.

J: blocks the arrays have room for; a block that was never written is ABSENT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np

from engine.kvcache.config import BLOCK, TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.tiers import MOVES, State, Tier
from engine.runtime.types import KVSummary

Busy = Literal["", "a step", "a move between tiers"]
WHOLE = np.uint32(0xFFFFFFFF)
"""Every token of a block is written."""

_TIERS = np.array(
    [
        Tier.ABSENT,
        Tier.FULL,
        Tier.FULL,
        Tier.WARM,
        Tier.COLD,
        Tier.COLD,
        Tier.COLD,
        Tier.COLD,
    ],
    np.int8,
)
"""Tier by state. A block on its way down is cold for its readers at once, and one on its way up
until it has arrived: what they see does not depend on how fast a thread is."""


@dataclass(frozen=True, slots=True)
class TierEvent:
    """A block changed its tier although position and length do not say so: at a context length of
    ``length`` tokens ``block`` went to ``tier``. A learner that repeats the rollout needs these."""

    length: int
    block: int
    tier: Tier


@dataclass(slots=True)
class ContextBlocks:
    """state uint8 [J]; full, warm int64 [J]: slots of the pools, 0 = none; record int64 [J]: serial
    of the cold record, 0 = none; written uint32 [J]: a bit for each token; kept bool [J]: fetched
    back on request, stays warm however old."""

    id: str
    config: TierConfig
    """The cache's, with a hot zone of this context's own if it has one."""
    length: int = 0
    state: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    full: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    warm: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    record: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    written: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    busy: Busy = ""
    closing: bool = False
    """Released while busy: goes when that ends."""
    served: int = 0
    """Epoch of its last step."""
    events: list[TierEvent] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return -(-self.length // BLOCK)

    def reserve(self, num_blocks: int) -> None:
        """Room for ``num_blocks`` blocks."""
        more = num_blocks - len(self.state)
        if more <= 0:
            return
        more = max(more, len(self.state) // 2)
        self.state = np.pad(self.state, (0, more))
        self.full = np.pad(self.full, (0, more))
        self.warm = np.pad(self.warm, (0, more))
        self.record = np.pad(self.record, (0, more))
        self.written = np.pad(self.written, (0, more))
        self.kept = np.pad(self.kept, (0, more))

    def copy(self, name: str) -> ContextBlocks:
        return ContextBlocks(
            name,
            self.config,
            self.length,
            self.state.copy(),
            self.full.copy(),
            self.warm.copy(),
            self.record.copy(),
            self.written.copy(),
            self.kept.copy(),
            events=list(self.events),
        )

    def move(self, block: int, state: State) -> None:
        old = State(self.state[block])
        assert state == State.ABSENT or (old, state) in MOVES, (
            f"context {self.id}, block {block}: {old.name} -> {state.name} is no move"
        )
        self.state[block] = state

    def where(self, *states: State, start: int = 0, stop: int | None = None) -> list[int]:
        """Blocks of [start, stop) in one of ``states``."""
        stop = self.num_blocks if stop is None else min(stop, self.num_blocks)
        found = np.isin(self.state[start:stop], states)
        return (np.flatnonzero(found) + start).tolist()

    def forget(self, block: int) -> None:
        """The block is gone; its references were given back."""
        self.move(block, State.ABSENT)
        self.full[block] = self.warm[block] = self.record[block] = 0
        self.written[block] = 0
        self.kept[block] = False

    def note(self, block: int, tier: Tier) -> None:
        self.events.append(TierEvent(self.length, block, tier))

    def tiers(self) -> np.ndarray:
        """int8 [num_blocks]"""
        return _TIERS[self.state[: self.num_blocks]]

    def tokens_in(self, tier: Tier) -> int:
        """Written tokens of a tier."""
        return int(np.bitwise_count(self.written[: self.num_blocks][self.tiers() == tier]).sum())

    def first_full(self) -> int:
        """First block after the last one that is not in full precision, at least 1."""
        states = self.state[: self.num_blocks]
        return 1 + int(np.max(np.flatnonzero(states != State.HOT), initial=0))

    def summary(self, layout: CacheLayout) -> KVSummary:
        """``kv_bytes`` on the device, a shared block counts for each context that holds it."""
        full, warm = np.count_nonzero(self.full), np.count_nonzero(self.warm)
        return KVSummary(
            num_tokens=self.length,
            num_hot=self.tokens_in(Tier.FULL),
            num_warm=self.tokens_in(Tier.WARM),
            num_cold=self.tokens_in(Tier.COLD),
            kv_bytes=int(full) * layout.full_block_bytes + int(warm) * layout.warm_block_bytes,
            cold_bytes=int(np.count_nonzero(self.record)) * layout.record_bytes,
        )

    def missing(self) -> np.ndarray:
        """Positions below ``length`` that are nowhere, int64, rising."""
        bits = self.written[: self.num_blocks, None] >> np.arange(BLOCK, dtype=np.uint32) & 1
        return np.flatnonzero(bits.reshape(-1)[: self.length] == 0)


def written_bits(offsets: np.ndarray) -> np.uint32:
    """Mask of tokens at offsets int64 [n] of a block."""
    return np.bitwise_or.reduce(np.uint32(1) << offsets.astype(np.uint32))


def runs_of(events: Iterable[TierEvent]) -> Iterator[tuple[Tier, int, int]]:
    """(tier, first token, end) of neighbouring blocks that went to the same tier one after the
    other."""
    for tier, group in groupby(events, key=lambda event: event.tier):
        start = end = -1
        for event in group:
            if event.block != end:
                if end >= 0:
                    yield tier, BLOCK * start, BLOCK * end
                start = event.block
            end = event.block + 1
        yield tier, BLOCK * start, BLOCK * end
