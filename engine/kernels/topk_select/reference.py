"""The k highest scores of each row: the torch twin."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_select_reference(scores: Tensor, k: int) -> Tensor:
    """See ``topk_select``."""
    scores = scores.float()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    # stable: equal scores keep the order of their positions
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    values, order = values[..., :k], order[..., :k]
    chosen = order.masked_fill(values == -torch.inf, -1)
    missing = k - chosen.shape[-1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1)
