"""Merging attention over disjoint parts by their log-sum-exp (facts/kv-attention.md 3)."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.lse_merge.reference import lse_merge_reference


def lse_merge(
    parts: Tensor, lses: Tensor, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """parts [P, ..., V], lses [P, ...] with P >= 1 -> o fp32 [..., V], lse fp32 [...]. A part that
    saw nothing has lse -inf; where all did, o = 0 and lse = -inf."""
    if runs_triton(implementation, parts):
        from engine.kernels.lse_merge.kernel import lse_merge_triton

        return lse_merge_triton(parts, lses)
    return lse_merge_reference(parts, lses)
