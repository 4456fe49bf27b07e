"""Routed SwiGLU experts as grouped matrix products."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.moe_grouped_gemm.reference import moe_grouped_gemm_reference


def moe_grouped_gemm(
    x: Tensor,
    used: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    implementation: Implementation = "auto",
) -> Tensor:
    """x [N, H], used int64 [N, K], weights [N, K], gate_up [E, 2I, H] (gate, then up), down
    [E, H, I] -> the weighted sum of each row's experts [N, H] in x's type. The kernel has no
    backward."""
    if runs_triton(implementation, x):
        from engine.kernels.moe_grouped_gemm.kernel import moe_grouped_gemm_triton

        return moe_grouped_gemm_triton(x, used, weights, gate_up, down)
    return moe_grouped_gemm_reference(x, used, weights, gate_up, down)
