"""Attention of one query a context over sink and window: the torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.merge import softmax_part
from engine.kernels.tiered import ABSENT, TieredLayer
from engine.kvcache.quantise import BLOCK


def decode_attn_reference(
    q: Tensor,
    layer: TieredLayer,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """See ``decode_attn_tiered``; also the twin of latent attention."""
    outs, lses = [], []
    rows = q.float().unflatten(1, (layer.groups, -1)) * scale
    for n in range(len(q)):
        position = visible_positions(layer, n, int(lengths[n]), int(starts[n]))
        blocks, place = (position // BLOCK).unique(return_inverse=True)
        token = place * BLOCK + position % BLOCK
        k = layer.key_blocks(n, blocks).transpose(0, 1).flatten(1, 2)[:, token]
        v = layer.value_blocks(n, blocks, value_dim).transpose(0, 1).flatten(1, 2)[:, token]
        out, lse = softmax_part(rows[n] @ k.transpose(1, 2), v)
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten())
    if not outs:
        return q.new_zeros(*q.shape[:2], value_dim).float(), q.new_zeros(q.shape[:2]).float()
    return torch.stack(outs), torch.stack(lses)


def visible_positions(layer: TieredLayer, context: int, length: int, start: int) -> Tensor:
    """Of sink [0, 32) and [start, length) what is on the device, int64."""
    position = torch.arange(length, device=layer.table.device)
    seen = (position < BLOCK) | (position >= start)
    return position[seen & (layer.tiers[context, position // BLOCK] != ABSENT)]
