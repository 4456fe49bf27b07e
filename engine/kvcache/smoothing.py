"""Boundary smoothing of coded blocks: an option of the measurements, off, because it does nothing.

For each block, head and channel the mean rounding error of the tokens at both ends is kept in fp16
and added to those tokens when the block is read. No other vector added to them can do better, so
it bounds what any smoothing of block boundaries could bring: KL 7.9e-6 -> 7.6e-6
(``python -m engine.bench.kv_claims --smoothing``; facts/kv-attention.md 0.7). It costs 3.1 % of
bf16 a block, not 0.3 %, and neither the pools nor the compiled decode step know it.

Shapes: B blocks of 32 tokens, G key-value heads, D size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kvcache.config import BLOCK

EDGE = 2
"""Tokens at each end of a block that are corrected."""


def correction(blocks: Tensor, coded: Tensor, edge: int = EDGE) -> Tensor:
    """fp16 [B, G, D] of blocks [B, G, 32, D] and what their codes give back."""
    places = _edges(edge)
    return (blocks[:, :, places] - coded[:, :, places]).mean(dim=2).half()


def smoothed(coded: Tensor, added: Tensor, edge: int = EDGE) -> Tensor:
    """[B, G, 32, D] with ``correction`` added. Its squared error is never larger: the mean is the
    best constant, and rounding to fp16 moves a number by less than the number."""
    result = coded.clone()
    result[:, :, _edges(edge)] += added.float()[:, :, None]
    return result


def _edges(edge: int) -> Tensor:
    assert 1 <= edge <= BLOCK // 2, f"{edge} tokens at each end of a block of {BLOCK}"
    return torch.tensor([*range(edge), *range(BLOCK - edge, BLOCK)])
