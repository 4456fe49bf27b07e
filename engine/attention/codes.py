"""Approximate scores of warm keys from their top two bits (facts/kv-attention.md 2.2).

Shapes: R query rows, G key-value heads, P query heads per key-value head, D key size, W blocks.

A key's code is taken at the middle of its top-two-bit range, (code >> 6) * 64 + 31.5, so

    q.k ~ sum_c q_c (minimum_c + 31.5 scale_c) + 64 sum_c (q_c scale_c) top_c

The first sum is one number per block and head; in the second q * scale is rounded to int8 per block
and head and the products are added as integers. Every floating-point step has a fixed order that
the native library repeats (16 lanes, then halves; nothing fused), so scores are the same bits
there, here, and for any number of query rows at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.view import WarmBlocks
from engine.kvcache.quantise import BLOCK, WarmKeys

LANES = 16
MIDDLE = 31.5
STEP = 64.0 / 127.0
"""Value of one unit of (int8 query x top bits), as a share of the largest |q * scale|."""
SMALLEST = 1e-30
"""A block and head whose largest |q * scale| is below this scores its first sum only."""
_TILE = 1 << 22
"""Numbers of q * scale that are held at a time."""


def scan_codes(q: Tensor, warm: WarmBlocks) -> Tensor:
    """q fp32 [R, G, P, D], already scaled -> fp32 scores [R, G, P, 32 W]."""
    step = max(1, _TILE // max(1, q.numel()))
    parts = [
        _scan(q, warm.gathered_keys(begin, begin + step)) for begin in range(0, len(warm), step)
    ]
    return torch.cat(parts, dim=3).flatten(3) if parts else q.new_zeros(*q.shape[:3], 0)


def _scan(q: Tensor, keys: WarmKeys) -> Tensor:
    """[R, G, P, W, 32]"""
    rows, groups, heads, _ = q.shape
    codes, peak = quantise_query(q, keys.scale)
    # at most 3 * 127 * D: exact in fp32 in any order for D < 44,000
    tops = top_bits(keys.top).float()
    flat = codes.permute(1, 2, 0, 3, 4).flatten(2, 3)
    sums = torch.matmul(flat, tops).unflatten(2, (rows, heads)).permute(2, 0, 1, 3, 4)
    middle = keys.minimum.float() + keys.scale.float() * MIDDLE
    first = ordered_sum(q[:, None] * middle[None, :, :, None])
    scores = first[..., None] + (peak * STEP)[..., None] * sums
    return scores.permute(0, 2, 3, 1, 4).contiguous().view(rows, groups, heads, -1, BLOCK)


def quantise_query(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """q fp32 [R, G, P, D], scale fp16 [W, G, D] -> whole numbers -127 .. 127 in fp32
    [R, W, G, P, D] and the largest |q * scale| [R, W, G, P]."""
    products = q[:, None] * scale.float()[None, :, :, None]
    peak = products.abs().amax(dim=-1)
    peak = peak.masked_fill(peak < SMALLEST, 0.0)
    # 127.0 / peak would be 127 times the rounded reciprocal
    factor = torch.where(peak > 0, torch.full_like(peak, 127.0) / peak, 0.0)
    return torch.round(products * factor[..., None]), peak


def top_bits(top: Tensor) -> Tensor:
    """uint8 [W, G, D/4, 32] -> 0 .. 3 [W, G, D, 32]"""
    return torch.stack([(top >> s) & 3 for s in (0, 2, 4, 6)], dim=3).flatten(2, 3)


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in the native library's order: lane l adds elements l, l + 16,
    ..., then the upper half of the lanes is added to the lower until one is left."""
    x = F.pad(x, (0, -x.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total = x[..., 0, :]
    for part in x.unbind(-2)[1:]:
        total = total + part
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
