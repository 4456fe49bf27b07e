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
    """fp32 keys and values of all layers: [layers][blocks + 1, S, G, D]."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, groups: int, head_dim: int
    ) -> None:
        shape = (num_blocks + 1, block_size, groups, head_dim)
        # zeros: block 0 pads block tables and must hold finite numbers
        self.keys = [torch.zeros(shape) for _ in range(num_layers)]
        self.values = [torch.zeros(shape) for _ in range(num_layers)]
        self.block_size = block_size
        self.bytes_per_block = 2 * num_layers * block_size * groups * head_dim * 4

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots int64 [N] = block * S + offset; k, v [N, G, D]."""
        self.keys[layer].view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        self.values[layer].view(-1, *v.shape[1:]).index_copy_(0, slots, v)

    def copy_block(self, source: int, target: int) -> None:
        for layer in range(len(self.keys)):
            self.keys[layer][target] = self.keys[layer][source]
            self.values[layer][target] = self.values[layer][source]

    def attend(self, layer: int, q: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
        """q [N, A, D], tables int64 [N, J], positions int64 [N] -> [N, A, D].

        Row n attends to positions 0 .. positions[n] of the context its table describes.
        """
        n, heads, head_dim = q.shape
        groups = self.keys[layer].shape[2]
        size = self.block_size
        scaled = (q * head_dim**-0.5).view(n * groups, heads // groups, head_dim)
        best = q.new_full((n * groups, heads // groups, 1), -torch.inf)
        total = q.new_zeros(n * groups, heads // groups, 1)
        out = torch.zeros_like(scaled)
        offsets = torch.arange(size)
        for j in range(tables.shape[1]):
            blocks = tables[:, j]
            keys = self.keys[layer][blocks].permute(0, 2, 3, 1).reshape(n * groups, head_dim, size)
            values = self.values[layer][blocks].permute(0, 2, 1, 3).reshape(-1, size, head_dim)
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
