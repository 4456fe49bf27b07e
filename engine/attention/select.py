"""Top-k with a fixed tie rule, choices per head or group, and how good a choice was.

Shapes: R query rows, G key-value heads, P query heads per key-value head, C scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.kvcache.quantise import BLOCK

STRIDE = 16
"""Scores that stand together, by their largest, in the first of two stages of a top-k."""
TWO_STAGES = 4 * STRIDE
"""Scores a wanted place from which two stages are the quicker way."""


def top_positions(scores: Tensor, count: int) -> Tensor:
    """Places of the ``count`` largest of scores [..., N], all when there are no more; rising.
    Among equals the lower place wins."""
    size = scores.shape[-1]
    if count >= size:
        return torch.arange(size).expand(*scores.shape[:-1], size)
    if size >= TWO_STAGES * count and size % STRIDE == 0:
        places = top_by_peaks(peaks(scores), lambda part: scores.gather(-1, part), count)
    else:
        places = _clear(scores, count)
    if places is None:
        places = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return places.sort(dim=-1).values


def peaks(scores: Tensor) -> Tensor:
    """scores [..., N] -> [..., N / STRIDE]: the largest of every STRIDE places that lie N / STRIDE
    apart. Neighbours stay in different ones, so that whole vectors are compared."""
    return scores.unflatten(-1, (STRIDE, -1)).amax(dim=-2)


def top_by_peaks(peaks: Tensor, scores_at: Callable[[Tensor], Tensor], count: int) -> Tensor | None:
    """Places of the ``count`` largest scores in any order, from ``peaks`` of them [..., N / STRIDE]
    and what gives scores [..., C] at places [..., C]; None when equals compete for the last place.
    At least ``count`` scores reach the count-th largest peak, so the rest is below all of those."""
    width = peaks.shape[-1]
    best = _clear(peaks, count)
    if best is None:
        return None
    places = (best[..., None, :] + width * torch.arange(STRIDE)[:, None]).flatten(-2)
    found = _clear(scores_at(places), count)
    return None if found is None else places.gather(-1, found)


def _clear(scores: Tensor, count: int) -> Tensor | None:
    """Places of the ``count`` largest, None when the next one is as large as the last."""
    best = scores.topk(count + 1, dim=-1)
    if (best.values[..., count - 1] > best.values[..., count]).all():
        return best.indices[..., :count]
    return None


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
