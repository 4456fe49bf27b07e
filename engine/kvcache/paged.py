"""Key and value storage in blocks, and attention that reads it block by block.

Shapes: N rows, A query heads, G key-value heads, D head size, S block size, J blocks of the longest
context in the batch. Attention is an online softmax over blocks (FlashAttention's recurrence): a
block that is masked for a row multiplies by exp(0) and adds 0, so a row's bits do not depend on how
long its neighbours are.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PagedKV:
    """fp32 keys [layers][blocks + 1, G, D, S] and values [layers][blocks + 1, G, S, D].

    Both lie the way the two products of attention read them, so a gathered block is used as it is.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, groups: int, head_dim: int
    ) -> None:
        # zeros: block 0 pads block tables and must hold finite numbers
        self.keys = [
            torch.zeros(num_blocks + 1, groups, head_dim, block_size) for _ in range(num_layers)
        ]
        self.values = [
            torch.zeros(num_blocks + 1, groups, block_size, head_dim) for _ in range(num_layers)
        ]
        self.block_size = block_size
        self.bytes_per_block = 2 * num_layers * block_size * groups * head_dim * 4

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k, v [N, G, D] at (block, offset), both int64 [N]."""
        self.keys[layer][blocks, :, :, offsets] = k
        self.values[layer][blocks, :, offsets] = v

    def copy_block(self, source: int, target: int) -> None:
        for layer in range(len(self.keys)):
            self.keys[layer][target] = self.keys[layer][source]
            self.values[layer][target] = self.values[layer][source]

    def clear_block(self, block: int) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[block] = 0.0
            values[block] = 0.0

    def attend(self, layer: int, q: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
        """q [N, A, D], tables int64 [N, J], positions int64 [N] -> [N, A, D].

        Row n attends to positions 0 .. positions[n] of the context its table describes.
        """
        n, heads, head_dim = q.shape
        groups = self.keys[layer].shape[1]
        size = self.block_size
        scaled = (q * head_dim**-0.5).view(n * groups, heads // groups, head_dim)
        best = q.new_full((n * groups, heads // groups, 1), -torch.inf)
        total = q.new_zeros(n * groups, heads // groups, 1)
        out = torch.zeros_like(scaled)
        offsets = torch.arange(size)
        for j in range(tables.shape[1]):
            blocks = tables[:, j]
            keys = self.keys[layer].index_select(0, blocks).view(n * groups, head_dim, size)
            values = self.values[layer].index_select(0, blocks).view(n * groups, size, head_dim)
            hidden = (offsets + j * size)[None] > positions[:, None]
            scores = torch.bmm(scaled, keys).view(n, groups, -1, size)
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf).view(
                n * groups, -1, size
            )
            new_best = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - new_best)
            fade = torch.exp(best - new_best)
            total = total * fade + weights.sum(dim=-1, keepdim=True)
            out = out * fade + torch.bmm(weights, values)
            best = new_best
        return (out / total).view(n, heads, head_dim)
