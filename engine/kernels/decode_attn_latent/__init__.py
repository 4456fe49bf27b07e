"""Latent attention (MLA) in its absorbed form over sink and window, tiers as in
``decode_attn_tiered``."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.decode_attn_latent.reference import decode_attn_reference
from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.tiered import TieredLayer


def decode_attn_latent(
    q: Tensor,
    layer: TieredLayer,
    rank: int,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Absorbed queries q [N, A, rank + rope], one key-value head -> o fp32 [N, A, rank], lse fp32
    [N, A]. The first ``rank`` channels of a key are its value."""
    assert layer.groups == 1, f"latent attention has one key-value head, not {layer.groups}"
    if runs_triton(implementation, q):
        from engine.kernels.decode_attn_latent.kernel import decode_latent_triton

        return decode_latent_triton(q, layer, rank, lengths, starts, scale)
    return decode_attn_reference(q, layer, lengths, starts, scale, rank)
