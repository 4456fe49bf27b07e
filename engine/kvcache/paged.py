"""Key and value storage in blocks, and attention that reads it block by block.

Shapes: N rows, A query heads, G key-value heads, D head size, V value size (D unless named), S
block size, J blocks of the longest context in the batch. Attention is an online softmax over blocks
(FlashAttention's recurrence): a block that is masked for a row multiplies by exp(0) and adds 0, so
a row's bits do not depend on how long its neighbours are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROWS = 32
"""Counts of rows are multiples of this, see engine.model.ops.TILE."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which blocks a batch reads, the same for every layer. Rows are sorted by falling number of
    blocks, so those that have a j-th block are the first ones.

    blocks[j]: int64 [m_j] physical block of each of the first m_j rows; hidden[j]: bool
    [m_j, 1, 1, S], true where a row must not look, None when all may be seen.
    """

    blocks: list[Tensor]
    hidden: list[Tensor | None]

    @classmethod
    def of(cls, tables: np.ndarray, positions: np.ndarray, block_size: int) -> AttentionPlan:
        """tables int64 [N, J], positions int64 [N]: row n attends to positions 0 .. positions[n]
        of the context its table describes. N is a multiple of 32."""
        last = positions // block_size
        assert len(last) % ROWS == 0 and (np.diff(last) <= 0).all(), "rows are not sorted"
        blocks: list[Tensor] = []
        hidden: list[Tensor | None] = []
        for j in range(int(last[0]) + 1):
            # a row without a j-th block reads block 0, all of it masked: an exact no-op
            num_rows = -(-int((last >= j).sum()) // ROWS) * ROWS
            blocks.append(torch.from_numpy(np.ascontiguousarray(tables[:num_rows, j])))
            seen = positions[:num_rows] - j * block_size
            mask = np.arange(block_size) > seen[:, None]
            hidden.append(torch.from_numpy(mask)[:, None, None] if mask.any() else None)
        return cls(blocks, hidden)


@dataclass(frozen=True, slots=True)
class WriteSlots:
    """Where a batch's rows go, the same in every layer: flat element numbers in a layer's keys,
    int64 [N * G * D], and flat rows of V elements in its values, int64 [N * G]."""

    keys: Tensor
    values: Tensor


class PagedKV:
    """Keys [layers][blocks + 1, G, D, S] and values [layers][blocks + 1, G, S, V].

    Both lie the way the two products of attention read them, so a gathered block is used as it is.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        groups: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``dtype`` bfloat16 is for engine.light.native; ``write`` and ``attend`` know float32."""
        value_dim = value_dim or head_dim
        # zeros: block 0 pads block tables and must hold finite numbers
        self.keys = [
            torch.zeros(num_blocks + 1, groups, head_dim, block_size, dtype=dtype)
            for _ in range(num_layers)
        ]
        self.values = [
            torch.zeros(num_blocks + 1, groups, block_size, value_dim, dtype=dtype)
            for _ in range(num_layers)
        ]
        self._buffers = [torch.empty(0), torch.empty(0)]
        self.block_size = block_size
        per_token = groups * (head_dim + value_dim) * dtype.itemsize
        self.bytes_per_block = num_layers * block_size * per_token

    def slots(self, blocks: Tensor, offsets: Tensor) -> WriteSlots:
        """Slots of N rows at (block, offset), both int64 [N]."""
        _, groups, head_dim, size = self.keys[0].shape
        lanes = torch.arange(groups * head_dim)
        keys = (blocks[:, None] * len(lanes) + lanes) * size + offsets[:, None]
        values = (blocks[:, None] * groups + torch.arange(groups)) * size + offsets[:, None]
        return WriteSlots(keys.flatten(), values.flatten())

    def write(self, layer: int, slots: WriteSlots, k: Tensor, v: Tensor) -> None:
        """Put k [N, G, D], v [N, G, V] in their slots. One flat scatter: indexing by (block,
        offset) took an eighth of a decoding step."""
        self.keys[layer].view(-1).scatter_(0, slots.keys, k.reshape(-1))
        value_dim = v.shape[-1]
        values = self.values[layer].view(-1, value_dim)
        values.index_copy_(0, slots.values, v.reshape(-1, value_dim))

    def copy_block(self, source: int, target: int) -> None:
        for layer in range(len(self.keys)):
            self.keys[layer][target] = self.keys[layer][source]
            self.values[layer][target] = self.values[layer][source]

    def clear_block(self, block: int) -> None:
        self.clear_blocks([block])

    def clear_blocks(self, blocks: list[int]) -> None:
        where = torch.tensor(blocks, dtype=torch.int64)
        for tensor in [*self.keys, *self.values]:
            tensor.index_fill_(0, where.to(tensor.device), 0.0)

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan) -> Tensor:
        """q [N, A, D] -> [N, A, V]; rows in the plan's order."""
        n, heads, head_dim = q.shape
        groups, value_dim = self.keys[layer].shape[1], self.values[layer].shape[3]
        size = self.block_size
        repeat = heads // groups
        scaled = (q * head_dim**-0.5).view(n * groups, repeat, head_dim)
        best = q.new_full((n * groups, repeat, 1), -torch.inf)
        total = q.new_zeros(n * groups, repeat, 1)
        out = q.new_zeros(n * groups, repeat, value_dim)
        for blocks, hidden in zip(plan.blocks, plan.hidden, strict=True):
            m = len(blocks)
            rows = slice(0, m * groups)
            keys = self._gather(self.keys[layer], blocks, 0).view(m * groups, head_dim, size)
            values = self._gather(self.values[layer], blocks, 1).view(m * groups, size, value_dim)
            scores = torch.bmm(scaled[rows], keys)
            if hidden is not None:
                scores.view(m, groups, repeat, size).masked_fill_(hidden, -torch.inf)
            new_best = torch.maximum(best[rows], scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - new_best)
            fade = torch.exp(best[rows] - new_best)
            total[rows] = total[rows] * fade + weights.sum(dim=-1, keepdim=True)
            out[rows] = out[rows] * fade + torch.bmm(weights, values)
            best[rows] = new_best
        return (out / total).view(n, heads, value_dim)

    def _gather(self, store: Tensor, blocks: Tensor, buffer: int) -> Tensor:
        """store[blocks] in a buffer that is used again: fresh pages cost more than the copy."""
        if len(self._buffers[buffer]) < len(blocks):
            self._buffers[buffer] = torch.empty(len(blocks), *store.shape[1:])
        return torch.index_select(store, 0, blocks, out=self._buffers[buffer][: len(blocks)])
