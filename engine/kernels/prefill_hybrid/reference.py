"""Attention of many queries a context with decode's masks: the torch twin, with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.merge import merge, softmax_part
from engine.kvcache.quantise import BLOCK

CHUNK = 128
"""Queries whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Knobs of masks, in tokens: the last ``window`` are seen, those before the last ``hot`` are
    read from codes, contexts up to ``dense_below`` are seen whole."""

    window: int
    hot: int
    dense_below: int = 0


def pack_positions(positions: Tensor, num_positions: int) -> Tensor:
    """positions int64 [..., M], -1 for none -> int32 [..., ceil(L / 32)]: bit i of word j stands
    for position 32 j + i."""
    words = -(-num_positions // BLOCK)
    bits = torch.zeros(*positions.shape[:-1], words * BLOCK + 1, dtype=torch.int64)
    bits = bits.to(positions.device)
    bits.scatter_(-1, torch.where(positions < 0, words * BLOCK, positions), 1)
    powers = torch.arange(BLOCK, device=positions.device)
    packed = (bits[..., :-1].unflatten(-1, (words, BLOCK)) << powers).sum(-1)
    return packed.to(torch.int32)  # wraps: bit 31 is the sign


def prefill_hybrid_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    warm_k: Tensor,
    warm_v: Tensor,
    selected: Tensor | None,
    firsts: Tensor,
    counts: Tensor,
    see: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See ``prefill_hybrid``."""
    queries, heads = q.shape[1:3]
    outs, lses = [], []
    for begin in range(0, queries, CHUNK):
        index = torch.arange(begin, min(begin + CHUNK, queries), device=q.device)
        bits = None if selected is None else selected[:, index]
        lengths = torch.where(index < counts[:, None], firsts[:, None] + index + 1, 0)
        seen, warm = masks(lengths, bits, k.shape[1], see)
        seen = seen.repeat_interleave(heads // seen.shape[1], dim=1)
        out, lse = _attend(q[:, index], k, v, warm_k, warm_v, seen, warm, scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def masks(
    lengths: Tensor, selected: Tensor | None, num_positions: int, see: Visibility
) -> tuple[Tensor, Tensor]:
    """Context lengths int64 [N, T] of queries, selected int32 [N, T, H, words] -> what they see,
    bool [N, H or 1, T, L], and what of it they read from codes, bool [N, 1, T, L]."""
    position = torch.arange(num_positions, device=lengths.device)
    t = lengths[:, None, :, None]
    near = (position < BLOCK) | (position >= t - see.window) | (t <= see.dense_below)
    if selected is not None:
        shift = torch.arange(BLOCK, device=lengths.device)
        bits = ((selected[..., None] >> shift) & 1).flatten(-2)[..., :num_positions]
        near = near | bits.bool().transpose(1, 2)
    warm_end = (t - see.hot).clamp(min=0) // BLOCK * BLOCK
    return near & (position < t), (position >= BLOCK) & (position < warm_end)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    warm_k: Tensor,
    warm_v: Tensor,
    seen: Tensor,
    warm: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    groups = k.shape[2]
    rows = q.float().transpose(1, 2).unflatten(1, (groups, -1)) * scale  # [N, G, R, T, D]

    def side(x: Tensor) -> Tensor:
        return x.float().transpose(1, 2)[:, :, None]  # [N, G, 1, L, D]

    logits = torch.where(
        warm[:, :, None], rows @ side(warm_k).transpose(3, 4), rows @ side(k).transpose(3, 4)
    )
    logits = logits.masked_fill(~seen.unflatten(1, (groups, -1)), -torch.inf)
    coded = logits.masked_fill(~warm[:, :, None], -torch.inf)
    exact = logits.masked_fill(warm[:, :, None], -torch.inf)
    # one softmax over both kinds of values
    out, lse = merge([softmax_part(coded, side(warm_v)), softmax_part(exact, side(v))])
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2).transpose(1, 2)
