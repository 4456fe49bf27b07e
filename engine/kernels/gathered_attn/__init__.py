"""Attention over chosen positions of any tier, and their exact scores.

``positions`` int64 [N, H, M] lists positions of each context, -1 for none: one list for each
key-value head (H = G), for each query head (H = A), or a number between that divides A and that G
divides. A position listed twice counts twice; one whose block is absent is not seen.
"""

from __future__ import annotations

from torch import Tensor

from engine.errors import AttentionError
from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.gathered_attn.reference import (
    gathered_attn_reference,
    gathered_scores_reference,
)
from engine.kernels.tiered import TieredLayer


def gathered_scores(
    q: Tensor,
    layer: TieredLayer,
    positions: Tensor,
    scale: float,
    implementation: Implementation = "auto",
) -> Tensor:
    """q [N, A, D] -> scale * q.k of the listed positions, fp32 [N, A, M], -inf where not seen. Keys
    are read with all their bits: this rescores what ``code_scan`` proposed."""
    _check(q, layer, positions)
    if runs_triton(implementation, q):
        from engine.kernels.gathered_attn.kernel import gathered_scores_triton

        return gathered_scores_triton(q, layer, positions, scale)
    return gathered_scores_reference(q, layer, positions, scale)


def gathered_attn(
    q: Tensor,
    layer: TieredLayer,
    positions: Tensor,
    scale: float,
    implementation: Implementation = "auto",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q [N, A, D] -> o fp32 [N, A, V], lse fp32 [N, A]. ``value_dim`` of latent layers: the first
    so many channels of a key are its value."""
    _check(q, layer, positions)
    size = layer.value_dim(value_dim)
    if runs_triton(implementation, q):
        from engine.kernels.gathered_attn.kernel import gathered_attn_triton

        return gathered_attn_triton(q, layer, positions, scale, size)
    return gathered_attn_reference(q, layer, positions, scale, size)


def _check(q: Tensor, layer: TieredLayer, positions: Tensor) -> None:
    lists = positions.shape[1]
    if q.shape[1] % lists or lists % layer.groups:
        raise AttentionError(
            f"{lists} lists of positions for {q.shape[1]} query heads and {layer.groups} key-value "
            "heads; expected a divisor of the one and a multiple of the other"
        )
