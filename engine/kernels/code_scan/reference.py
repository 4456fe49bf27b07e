"""Scoring far warm tokens by the top two bits of their codes: the torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.codes import scan_codes
from engine.attention.select import share_scores
from engine.attention.view import WarmBlocks
from engine.kernels.tiered import WARM, TieredLayer
from engine.kvcache.quantise import BLOCK


def code_scan_reference(
    q: Tensor, layer: TieredLayer, starts: Tensor, scale: float, share: bool
) -> Tensor:
    """See ``code_scan``."""
    contexts, heads = q.shape[:2]
    groups, width = layer.groups, layer.table.shape[1]
    scaled = (q.float() * scale).unflatten(1, (groups, -1))
    shape = (contexts, groups, heads // groups, width, BLOCK)
    out = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    for n in range(contexts):
        last = min(-(-int(starts[n]) // BLOCK), width)
        blocks = torch.arange(1, max(last, 1), device=q.device)
        blocks = blocks[layer.tiers[n, blocks] == WARM]
        found = WarmBlocks(layer.keys, layer.values, blocks, layer.table[n, blocks].long())
        scores = scan_codes(scaled[n][None], found)[0]
        out[n, :, :, blocks] = scores.unflatten(-1, (-1, BLOCK))
    position = torch.arange(width * BLOCK, device=q.device)
    far = position < starts[:, None]
    scores = out.flatten(3).masked_fill(~far[:, None, None], -torch.inf)
    return share_scores(scores, "max") if share else scores.flatten(1, 2)
