"""The k highest scores of each row, ties to the lower position."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.topk_select.reference import topk_select_reference


def topk_select(scores: Tensor, k: int, implementation: Implementation = "auto") -> Tensor:
    """scores [..., L] with L < 2^31 and k >= 1 -> positions int64 [..., k], highest score first,
    equal scores by rising position. -inf and NaN are never chosen; -1 fills what is missing."""
    assert k >= 1, f"top {k} of a row is nothing"
    if runs_triton(implementation, scores):
        from engine.kernels.topk_select.kernel import topk_select_triton

        return topk_select_triton(scores, k)
    return topk_select_reference(scores, k)
