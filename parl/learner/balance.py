"""Load balance without a loss term: the router's bias moves, nothing else (DeepSeek-V3, 2.1.2).

The bias only selects experts; it never enters their weights, so it needs no gradient.
"""

from __future__ import annotations

from torch import Tensor

from engine.model.balance import move_bias
from engine.model.model import PolicyModel
from engine.model.moe import MoE


def move_router_bias(model: PolicyModel, loads: Tensor, rate: float) -> None:
    """bias += rate * sign(mean load - load) in each MoE layer; loads [L, E] tokens an expert."""
    routers = [layer.mlp.gate for layer in model.layers if isinstance(layer.mlp, MoE)]
    for router, load in zip(routers, loads, strict=True):
        move_bias(router.e_score_correction_bias, load, rate)
