"""Summaries of blocks standing for tokens that are not read (facts/kv-attention.md 3).

What is summarised: warm tokens that were not retrieved, and cold blocks, of which nothing can be.
The weight w and the number n of tokens a summary stands for enter as + log w and + log n on its
logit. Untrained means make attention worse (facts 0.5), so ``summary_weight`` is 0 by default and
then none of this runs; trained ones come from engine.attention.summary_adapters.

Shapes: R query rows, G key-value heads, P query heads per key-value head, D key size, V value size,
J summarised blocks, W warm blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.merge import Part, softmax_part
from engine.attention.retrieve import Retrieved
from engine.attention.view import WarmBlocks
from engine.errors import AttentionError
from engine.kvcache.quantise import BLOCK


@dataclass(frozen=True, slots=True)
class Summaries:
    """keys [G, J, D], values [G, J, V], one of each a block; blocks int64 [J]: their numbers,
    rising, warm ones among them; gate [G, P]: added to the logits of each query head, None adds
    nothing."""

    keys: Tensor
    values: Tensor
    blocks: Tensor
    gate: Tensor | None = None


Summarise = Callable[[Summaries], Summaries]
"""From block means to what stands for the blocks, in one layer."""


def check_summarise(config: HybridConfig, given: object) -> None:
    """AttentionError where trained summaries are on and this call has none."""
    if config.summary_weight > 0 and config.summaries == "adapters" and given is None:
        raise AttentionError(
            "summary_weight > 0 with trained summaries, but this call is not given any; pass what "
            "the adapters make of the blocks' means, or set summaries = 'mean'"
        )


def block_means(warm: WarmBlocks, value_dim: int) -> Summaries:
    """Means of what the blocks read as."""
    return means_of(warm.dequantised_keys(), warm.dequantised_values(value_dim), warm.blocks)


def means_of(k: Tensor, v: Tensor, blocks: Tensor) -> Summaries:
    """k [G, 32 J, D], v [G, 32 J, V], blocks int64 [J]"""
    return Summaries(
        k.unflatten(1, (-1, BLOCK)).mean(dim=2), v.unflatten(1, (-1, BLOCK)).mean(dim=2), blocks
    )


def summary_part(
    q: Tensor, summaries: Summaries, found: Retrieved, warm_blocks: Tensor, weight: float
) -> Part:
    """q fp32 [R, G, P, D], already scaled; warm_blocks int64 [W]: numbers of the blocks that
    ``found`` chose from, every other one stands for all its tokens -> o [R, G, P, V],
    lse [R, G, P]."""
    assert weight > 0, "weight 0 is the absence of this part"
    logits = torch.einsum("rgpd,gjd->rgpj", q, summaries.keys)
    counts = remaining(found, logits.shape, summaries.blocks, warm_blocks)
    logits = logits + counts.log() + math.log(weight)
    if summaries.gate is not None:
        logits = logits + summaries.gate[..., None]
    return softmax_part(logits, summaries.values)


def remaining(found: Retrieved, shape: torch.Size, blocks: Tensor, warm_blocks: Tensor) -> Tensor:
    """Tokens of each block that a head did not retrieve: fp32 of shape [R, G, P, J]."""
    counts = torch.full(shape, float(BLOCK))
    num_warm = found.tokens.shape[-1]
    if not num_warm:
        return counts
    chosen = found.chosen[..., :num_warm].float()
    column = torch.searchsorted(blocks, warm_blocks)
    places = column[found.tokens // BLOCK][:, :, None].expand(chosen.shape)
    return counts.scatter_add_(-1, places, -chosen)
