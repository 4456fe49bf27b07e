"""Attention over summaries of blocks: the torch twin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.attention.merge import softmax_part


def summary_attn_reference(
    q: Tensor, keys: Tensor, values: Tensor, counts: Tensor, scale: float, weight: float
) -> tuple[Tensor, Tensor]:
    """See ``summary_attn``."""
    groups = keys.shape[1]
    rows = q.float().unflatten(1, (groups, -1)) * scale
    bias = counts.float().log() + (math.log(weight) if weight > 0 else -math.inf)
    logits = rows @ keys.float().transpose(2, 3) + bias.unflatten(1, (groups, -1))
    hidden = (counts == 0).unflatten(1, (groups, -1)) | (weight == 0)
    # a summary of nothing may hold anything
    gone = (counts == 0).unflatten(1, (groups, -1)).all(dim=2)
    kept = values.float().masked_fill(gone[..., None], 0.0)
    out, lse = softmax_part(logits.masked_fill(hidden, -torch.inf), kept)
    return out.flatten(1, 2), lse.flatten(1, 2)
