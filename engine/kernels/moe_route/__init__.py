"""Choosing experts by biased sigmoid scores (noaux_tc), as engine.model.moe does."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.moe_route.reference import moe_route_reference


def moe_route(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """logits [N, E], bias [E] -> experts int64 [N, K] by rising id, weights fp32 [N, K].

    The K best of sigmoid + bias, of the ``top_groups`` groups whose two best sum highest; weights
    are the sigmoids without the bias, divided by their sum with ``normalise``, times ``scale``. Of
    equal scores the lower id is taken. Groups have two experts or more."""
    if runs_triton(implementation, logits):
        from engine.kernels.moe_route.kernel import moe_route_triton

        return moe_route_triton(logits, bias, top_k, groups, top_groups, normalise, scale)
    return moe_route_reference(logits, bias, top_k, groups, top_groups, normalise, scale)
