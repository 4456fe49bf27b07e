"""Top-k with a fixed tie rule, choices per head or group, and how good a choice was.

Shapes: R query rows, G key-value heads, P query heads per key-value head, C scored tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.kvcache.quantise import BLOCK


def top_positions(scores: Tensor, count: int) -> Tensor:
    """Places of the ``count`` largest of scores [..., N], all when there are no more; rising.
    Among equals the lower place wins."""
    size = scores.shape[-1]
    if count >= size:
        return torch.arange(size).expand(*scores.shape[:-1], size)
    best = scores.topk(count + 1, dim=-1)
    values = best.values
    if (values[..., count - 1] > values[..., count]).all():
        return best.indices[..., :count].sort(dim=-1).values
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def share_scores(
    scores: Tensor, share: Literal["max", "softmax"], total: Tensor | None = None
) -> Tensor:
    """Scores of a group's heads [R, G, P, C] as one [R, G, C]. ``total`` [R, G, P]: log-sum-exp of
    more than these, for the shares of a softmax over more than these."""
    if share == "max":
        return scores.amax(dim=2)
    if total is not None:
        return (scores.double() - total.double()[..., None]).exp().sum(dim=2).float()
    return scores.double().softmax(dim=-1).nan_to_num(0.0).sum(dim=2).float()


def choose(logits: Tensor, config: HybridConfig, total: Tensor | None = None) -> Tensor:
    """What is read of C scored tokens, in order of position and in whole blocks of 32 places when
    the unit is a block: logits [R, G, P, C], -inf where there is nothing -> bool [R, G, P, C].
    ``total``: see share_scores."""
    seen = logits > -torch.inf
    ranked = logits
    if config.topk_shared:
        ranked = share_scores(logits, config.share, total)[:, :, None]
        ranked = ranked.masked_fill(~seen.any(dim=2, keepdim=True), -torch.inf)
    if config.topk_unit == "block":
        ranked = ranked.unflatten(-1, (-1, BLOCK)).amax(dim=-1)
    places = top_positions(ranked, config.topk)
    chosen = torch.zeros(ranked.shape, dtype=torch.bool).scatter_(-1, places, True)
    if config.topk_unit == "block":
        chosen = chosen.repeat_interleave(BLOCK, dim=-1)
    return chosen & seen


def listed(chosen: Tensor, positions: Tensor, width: int) -> Tensor:
    """A choice as a list: chosen bool [R, G, P, C], at most ``width`` a row, and positions int64
    [R, G, C], rising -> int32 [R, G, P, width], rising, filled up with -1."""
    place = chosen.cumsum(dim=-1).sub_(1).masked_fill_(~chosen, width)
    listing = torch.full((*chosen.shape[:3], width + 1), -1, dtype=torch.int64)
    listing.scatter_(-1, place, positions[:, :, None].expand(chosen.shape))
    return listing[..., :width].to(torch.int32)


def recall(found: Tensor, wanted: Tensor) -> float:
    """Share of the positions in wanted [..., K] that are in found [..., L]; -1 is no position.
    1 when nothing is wanted."""
    real = wanted >= 0
    hits = (wanted[..., :, None] == found[..., None, :]).any(dim=-1) & real
    return float(hits.sum() / real.sum()) if bool(real.any()) else 1.0


def captured_mass(logits: Tensor, chosen: Tensor) -> Tensor:
    """Share of the softmax mass of logits [..., N] that lies in chosen bool [..., N]: [...]."""
    return (logits.double().softmax(dim=-1) * chosen).sum(dim=-1).float()
