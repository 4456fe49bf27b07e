"""Small contexts for the tests of hybrid attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.config import HybridConfig


@dataclass(frozen=True)
class Case:
    """q [T, A, D], k [T, G, D], v [T, G, V]"""

    q: Tensor
    k: Tensor
    v: Tensor


def random_case(
    length: int, heads: int = 4, groups: int = 2, dim: int = 32, value: int = 24
) -> Case:
    """Keys have channel means of their own, as those of real models do."""
    generator = torch.Generator().manual_seed(length * 1000 + dim)
    k = torch.randn(length, groups, dim, generator=generator)
    k += torch.randn(groups, dim, generator=generator)
    v = torch.randn(length, groups, value, generator=generator)
    return Case(2 * torch.randn(length, heads, dim, generator=generator), k, v)


def small_config(**changes: object) -> HybridConfig:
    """Far tokens from a context of 100 on, with a hot zone of at least 32."""
    base = {"window": 32, "topk": 8, "candidates": 24, "dense_below": 100, "native": "off"}
    return HybridConfig.model_validate(base | changes)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The definition: q [A, D], scaled; k [T, G, D], v [T, G, V], seen bool [A, T] -> [A, V]."""
    repeat = len(q) // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    logits = torch.einsum("ad,tad->at", q.double(), k.double())
    weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("at,tav->av", weights, v.double()).float()
