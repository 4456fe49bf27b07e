"""Routed SwiGLU experts: the torch twin is the model's own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.experts import GroupedExperts


def moe_grouped_gemm_reference(
    x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """See ``moe_grouped_gemm``."""
    result = GroupedExperts.apply(x, used, weights, gate_up, down)
    assert isinstance(result, torch.Tensor), "apply returns what forward returned"
    return result
