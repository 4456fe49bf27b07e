"""PagedRows: the rows of one step in a cache of full precision."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.kvcache.paged import ROWS, AttentionPlan, PagedKV, WriteSlots


class PagedRows:
    """CacheRows over PagedKV: tables int64 [N, J], positions int64 [N]."""

    def __init__(self, kv: PagedKV, tables: np.ndarray, positions: np.ndarray) -> None:
        self.kv, self.tables, self.positions = kv, tables, positions
        # rows of the longest contexts first (AttentionPlan)
        self.order = np.argsort(-(positions // kv.block_size), kind="stable")

    @cached_property
    def _places(self) -> tuple[AttentionPlan, WriteSlots]:
        """What the rows read and where they write; the native step needs neither."""
        size, n = self.kv.block_size, len(self.positions)
        # padding rows come last and read block 0, which nobody owns or writes: a NaN there would
        # reach every row that reads past its end
        padding = -n % ROWS
        where = np.pad(self.positions[self.order], (0, padding))
        tables = np.pad(self.tables[self.order], ((0, padding), (0, 0)))
        plan = AttentionPlan.of(tables, where, size)
        blocks = torch.from_numpy(tables[np.arange(n), where[:n] // size])
        return plan, self.kv.slots(blocks, torch.from_numpy(where[:n] % size))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan, slots = self._places
        n = len(self.positions)
        self.kv.write(layer, slots, k[:n], v[:n])
        return self.kv.attend(layer, q, plan)

    def finish(self) -> None:
        return None
