"""A step: a snapshot of the blocks its contexts read and write, and what it will commit.

Shapes: N rows, J blocks of a context, G key-value heads, D key size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.kvcache.config import TierConfig
from engine.kvcache.quantise import BLOCK, WarmKeys, WarmValues
from engine.kvcache.table import ContextBlocks
from engine.kvcache.tiers import Tier, cold_end, warm_end


@dataclass(frozen=True, slots=True)
class StepView:
    """One context in a step. Blocks that turn warm in it are in both ``full`` and ``warm``, because
    the step's first queries may still see them in full precision: ``tiers`` decides by query.

    positions int64 [n], rising: rows written here; full, warm int64 [J]: slots, 0 = none; kept
    bool [J]; ``length``: context length after the step.
    """

    context: ContextBlocks
    positions: np.ndarray
    length: int
    full: np.ndarray
    warm: np.ndarray
    kept: np.ndarray
    config: TierConfig

    def tiers(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """What a query of context length t reads: tier int8 [ceil(t / 32)] (FULL, WARM, or ABSENT
        for cold, evicted and lost blocks) and slot int32 in that tier's pool, 0 when absent."""
        num_blocks = min(-(-t // BLOCK), len(self.full))
        blocks = np.arange(num_blocks)
        full, warm = self.full[:num_blocks], self.warm[:num_blocks]
        # a block that was computed again late has only the form it has now
        coded = (warm > 0) & ((blocks < warm_end(t, self.config)) | (full == 0))
        if self.config.deterministic:
            cold = (blocks >= 1) & (blocks < cold_end(t, self.config)) & ~self.kept[:num_blocks]
            # one without codes is being computed again and has nothing else to be read from
            cold &= warm > 0
            coded &= ~cold
            full = np.where(cold, 0, full)
        tier = np.where(coded, Tier.WARM, np.where(full > 0, Tier.FULL, Tier.ABSENT))
        slot = np.where(coded, warm, full)
        return tier.astype(np.int8), slot.astype(np.int32)


@dataclass(frozen=True, slots=True)
class LayerRead:
    """One context's blocks in one layer, for a query of one context length. Nothing is copied.

    full_keys [S, G, 32, D], full_values [S, G, 32, V], warm_keys and warm_values are whole pools
    (values None: latent attention, a value is its key's first V numbers); *_slots int64 [n] name
    this context's blocks in them, *_blocks int64 [n] which blocks they are, rising.
    """

    full_blocks: Tensor
    full_slots: Tensor
    full_keys: Tensor
    full_values: Tensor | None
    warm_blocks: Tensor
    warm_slots: Tensor
    warm_keys: WarmKeys | None
    warm_values: WarmValues | None

    def full_positions(self) -> Tensor:
        """int64 [32 n]; a block's tokens past the query's own position are not to be seen."""
        return (self.full_blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()


@dataclass(frozen=True, slots=True)
class Coding:
    """Full slots that the step codes, one context each entry: (view, block, full slot, warm slot).
    ``fresh`` of them, named once, need the arithmetic: the others are shared."""

    moves: list[tuple[StepView, int, int, int]]
    fresh_full: Tensor
    fresh_warm: Tensor
    owners: list[list[str]]
    """Contexts behind each fresh slot."""


@dataclass(slots=True)
class Step:
    """Rows of all views one after the other: ``rows`` int64 [N * G], see FullPool.rows."""

    views: list[StepView]
    rows: Tensor
    coding: Coding
    created: list[tuple[ContextBlocks, int]]
    """Blocks that the step began."""
    failed: set[str] = field(default_factory=set)
    """Contexts with a block that no code stands for: NaN, or too large. They read NaN from it."""
    is_open: bool = True
