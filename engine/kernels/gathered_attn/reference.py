"""Attention over chosen positions: the torch twins."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.merge import softmax_part
from engine.kernels.tiered import TieredLayer


def gathered_scores_reference(
    q: Tensor, layer: TieredLayer, positions: Tensor, scale: float
) -> Tensor:
    """See ``gathered_scores``."""
    keys, _, known = _rows(layer, positions)
    query = q.float().unflatten(1, (positions.shape[1], -1)) * scale
    logits = query @ keys.transpose(2, 3)
    return logits.masked_fill(~known[:, :, None], -torch.inf).flatten(1, 2)


def gathered_attn_reference(
    q: Tensor, layer: TieredLayer, positions: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """See ``gathered_attn``."""
    keys, values, known = _rows(layer, positions)
    query = q.float().unflatten(1, (positions.shape[1], -1)) * scale
    logits = (query @ keys.transpose(2, 3)).masked_fill(~known[:, :, None], -torch.inf)
    out, lse = softmax_part(logits, values[..., :value_dim])
    return out.flatten(1, 2), lse.flatten(1, 2)


def _rows(layer: TieredLayer, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``layer.rows`` for H lists, each of the key-value head that its queries belong to."""
    contexts, lists, count = positions.shape
    by_head = positions.reshape(contexts, layer.groups, -1)
    keys, values, known = layer.rows(by_head)
    shape = (contexts, lists, count)
    return keys.view(*shape, -1), values.view(*shape, -1), known.view(shape)
