"""Scores of keys whose last bits do not depend on how many are scored at once.

Shapes: R query rows, G key-value heads, P query heads per key-value head, D key size, N keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_scores(q: Tensor, k: Tensor) -> Tensor:
    """q fp32 [R, G, P, D], k [G, N, D] -> fp32 [R, G, P, N].

    Products of fp32 numbers are exact in fp64, so after rounding the sum back to fp32 the order of
    addition, which differs by shape and library, shows once in about 2^20 scores and then by one
    unit in the last place.
    """
    rows, _, heads, _ = q.shape
    flat = q.transpose(0, 1).flatten(1, 2).double()
    scores = torch.matmul(flat, k.double().transpose(1, 2)).float()
    return scores.unflatten(1, (rows, heads)).transpose(0, 1)
