"""One hybrid decode step of one layer out of this package's ops, for a batch of contexts.

The same choice and sums as engine.attention.hybrid, whose knobs it takes: sink and window exactly,
of the far tokens the best by code scan and exact scores, block means if they are on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.errors import NotSupportedError
from engine.kernels.code_scan import code_scan
from engine.kernels.decode_attn_latent import decode_attn_latent
from engine.kernels.decode_attn_tiered import decode_attn_tiered
from engine.kernels.dispatch import Implementation
from engine.kernels.gathered_attn import gathered_attn, gathered_scores
from engine.kernels.lse_merge import lse_merge
from engine.kernels.summary_attn import summary_attn
from engine.kernels.tiered import FULL, WARM, TieredLayer
from engine.kernels.topk_select import topk_select
from engine.kvcache.quantise import BLOCK


@dataclass(frozen=True, slots=True)
class Step:
    """out fp32 [N, A, V], lse fp32 [N, A]; selected int64 [N, A or G, topk], rising positions
    filled up with -1."""

    out: Tensor
    lse: Tensor
    selected: Tensor


@torch.no_grad()
def decode_hybrid(
    q: Tensor,
    layer: TieredLayer,
    lengths: Tensor,
    hot: int,
    config: HybridConfig,
    scale: float,
    means: tuple[Tensor, Tensor] | None = None,
    implementation: Implementation = "auto",
    value_dim: int | None = None,
) -> Step:
    """q [N, A, D], the newest tokens' queries, lengths int64 [N]; ``hot``: the most tokens that are
    not warm yet. ``means`` [N, G, J, D or V] of all blocks, needed when summary_weight > 0.
    ``value_dim`` of latent layers: how much of a key is its value. A row's result does not depend
    on the others. NotSupportedError for an index without a kernel."""
    check(config)
    how = implementation
    dense = lengths <= config.dense_below
    starts = torch.where(dense, 0, (lengths - config.window).clamp(min=BLOCK))
    if layer.is_latent:
        rank = layer.value_dim(value_dim)
        parts = [decode_attn_latent(q, layer, rank, lengths, starts, scale, how)]
    else:
        parts = [decode_attn_tiered(q, layer, lengths, starts, scale, how)]
    selected = choose_far(q, layer, lengths, starts, hot, config, scale, how)
    parts.append(gathered_attn(q, layer, selected, scale, how, value_dim))
    if config.summary_weight > 0:
        assert means is not None, "summary_weight > 0 needs the blocks' means"
        counts = remaining(layer, selected, starts, q.shape[1])
        parts.append(summary_attn(q, *means, counts, scale, config.summary_weight, how))
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = lse_merge(outs, lses, how)
    return Step(out, lse, selected)


def check(config: HybridConfig) -> None:
    """NotSupportedError for what has no kernel."""
    if config.index not in ("codes", "none") or config.topk_unit != "token":
        raise NotSupportedError(
            f"no kernel retrieves with index = {config.index!r} and topk_unit = "
            f"{config.topk_unit!r}; use index codes or none with topk_unit token, or attend_hybrid"
        )
    if config.share != "max":
        raise NotSupportedError(
            f"no kernel shares scores by {config.share!r}; use share = max, or attend_hybrid"
        )


def choose_far(
    q: Tensor,
    layer: TieredLayer,
    lengths: Tensor,
    starts: Tensor,
    hot: int,
    config: HybridConfig,
    scale: float,
    how: Implementation,
) -> Tensor:
    """Positions int64 [N, A, topk], or [N, G, topk] when shared; rising, filled up with -1."""
    lists = layer.groups if config.topk_shared else q.shape[1]
    if config.index == "none":
        shape = (len(q), lists, config.topk)
        return torch.full(shape, -1, dtype=torch.int64, device=q.device)
    coarse = code_scan(q, layer, starts, scale, True, how)
    warm = topk_select(coarse, config.candidates, how)
    not_warm = hot_far(layer, lengths, starts, hot - config.window + BLOCK)
    # rising positions, so that equal scores go to the lower position below
    candidates = torch.cat([warm, not_warm], dim=2).sort(dim=2).values
    scores = gathered_scores(q, layer, candidates, scale, how)
    if config.topk_shared:
        scores = scores.unflatten(1, (layer.groups, -1)).amax(dim=2)
    best = topk_select(scores, config.topk, how)
    spread = candidates.repeat_interleave(lists // layer.groups, dim=1)
    last = torch.iinfo(torch.int64).max
    rising = spread.gather(2, best.clamp(min=0)).where(best >= 0, last).sort(dim=2).values
    return rising.where(rising < last, -1)


def hot_far(layer: TieredLayer, lengths: Tensor, starts: Tensor, count: int) -> Tensor:
    """Positions that are not warm yet and lie before the window: int64 [N, G, count], -1 for none;
    there are no more than ``count``."""
    blocks = torch.arange(layer.table.shape[1], device=lengths.device)
    old = (layer.tiers != FULL) & (BLOCK * blocks < lengths[:, None])
    warm_end = BLOCK * (1 + (blocks * old).amax(dim=1))
    position = warm_end[:, None] + torch.arange(count, device=lengths.device)
    position = position.where(position < starts[:, None], -1)
    return position[:, None].expand(-1, layer.groups, -1)


def remaining(layer: TieredLayer, selected: Tensor, starts: Tensor, heads: int) -> Tensor:
    """Tokens of each far warm block that a head did not retrieve, int64 [N, A, J]."""
    width = layer.table.shape[1]
    blocks = torch.arange(width, device=selected.device)
    far = (layer.tiers == WARM) & (blocks >= 1) & (BLOCK * blocks < starts[:, None])
    chosen = selected.repeat_interleave(heads // selected.shape[1], dim=1)
    place = torch.where(chosen < 0, width, chosen // BLOCK)
    taken = torch.zeros(*chosen.shape[:2], width + 1, dtype=torch.int64, device=place.device)
    taken.scatter_add_(2, place, torch.ones_like(place))
    return (BLOCK - taken[..., :width]) * far[:, None]
