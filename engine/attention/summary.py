"""Block means standing for tokens that were not retrieved (facts/kv-attention.md 3).

Untrained means make attention worse (facts 0.5), so ``summary_weight`` is 0 by default and then
none of this runs. The weight w and the number n of tokens a mean stands for enter as + log w and
+ log n on its logit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.merge import Part, softmax_part
from engine.attention.retrieve import Retrieved
from engine.attention.view import WarmBlocks
from engine.kvcache.quantise import BLOCK


@dataclass(frozen=True, slots=True)
class Summaries:
    """keys [G, W, D], values [G, W, V]: one of each a warm block, in the order of the view."""

    keys: Tensor
    values: Tensor


def block_means(warm: WarmBlocks, value_dim: int) -> Summaries:
    """Means of what the blocks read as."""
    return means_of(warm.dequantised_keys(), warm.dequantised_values(value_dim))


def means_of(k: Tensor, v: Tensor) -> Summaries:
    """k [G, 32 W, D], v [G, 32 W, V]"""
    return Summaries(
        k.unflatten(1, (-1, BLOCK)).mean(dim=2), v.unflatten(1, (-1, BLOCK)).mean(dim=2)
    )


def summary_part(q: Tensor, summaries: Summaries, found: Retrieved, weight: float) -> Part:
    """q fp32 [R, G, P, D], already scaled -> o [R, G, P, V], lse [R, G, P]."""
    assert weight > 0, "weight 0 is the absence of this part"
    logits = torch.einsum("rgpd,gwd->rgpw", q, summaries.keys)
    logits = logits + remaining(found, logits.shape).log() + math.log(weight)
    return softmax_part(logits, summaries.values)


def remaining(found: Retrieved, shape: torch.Size) -> Tensor:
    """Tokens of each block that a head did not retrieve: fp32 of shape [R, G, P, W]."""
    num_warm = found.tokens.shape[-1]
    chosen = found.chosen[..., :num_warm].float()
    places = (found.tokens // BLOCK)[:, :, None].expand(chosen.shape)
    return torch.full(shape, float(BLOCK)).scatter_add(-1, places, -chosen)
