"""Choosing experts: the torch twin."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route_reference(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See ``moe_route``."""
    scores = torch.sigmoid(logits.float())
    biased = scores + bias.float()
    if groups > 1:
        grouped = biased.unflatten(1, (groups, -1))
        worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(worth, dtype=torch.bool)
        kept.scatter_(1, _first_of_best(worth, top_groups), True)
        biased = grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    used = _first_of_best(biased, top_k).sort(dim=-1).values
    weights = scores.gather(1, used)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return used, weights * scale


def _first_of_best(x: Tensor, k: int) -> Tensor:
    """topk of torch takes any of equal numbers; this takes the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
