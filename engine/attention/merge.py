"""Attention over disjoint parts, put together by their log-sum-exp (facts/kv-attention.md 3).

A part is (o, lse): o [..., V] its softmax average of values, lse [...] the log of the sum of its
exponentials. A part that sees nothing has o = 0 and lse = -inf. Merging is exact, associative and
commutative as long as no position is in two parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]


def softmax_part(logits: Tensor, values: Tensor) -> Part:
    """logits [..., P, N], -inf where hidden; values [..., N, V] -> o [..., P, V], lse [..., P]."""
    if not logits.shape[-1]:
        return logits.new_zeros(*logits.shape[:-1], values.shape[-1]), logits.new_full(
            logits.shape[:-1], -torch.inf
        )
    peak = _finite(logits.amax(dim=-1))
    weights = (logits - peak[..., None]).exp()
    total = weights.sum(dim=-1)
    out = torch.matmul(weights, values) / _positive(total)[..., None]
    return out, peak + total.log()


def merge(parts: Sequence[Part]) -> Part:
    """One part out of any number of disjoint ones."""
    assert parts, "nothing to merge"
    lses = torch.stack([lse for _, lse in parts])
    peak = _finite(lses.amax(dim=0))
    weights = (lses - peak).exp()
    total = weights.sum(dim=0)
    shares = weights / _positive(total)
    out = torch.zeros_like(parts[0][0])
    for share, (part, _) in zip(shares, parts, strict=True):
        out = out + share[..., None] * part
    return out, peak + total.log()


def _finite(peak: Tensor) -> Tensor:
    """-inf - -inf is NaN, so an empty part is measured from 0."""
    return peak.detach().masked_fill(peak == -torch.inf, 0.0)


def _positive(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)
