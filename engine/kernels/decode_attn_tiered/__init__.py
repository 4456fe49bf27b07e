"""Attention of one query a context over sink and window, in full precision or from codes."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.decode_attn_tiered.reference import decode_attn_reference
from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.tiered import TieredLayer


def decode_attn_tiered(
    q: Tensor,
    layer: TieredLayer,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """q [N, A, D], lengths and starts int64 [N] -> o fp32 [N, A, V], lse fp32 [N, A].

    A query sees positions [0, 32) and [start, length) of its context, so a start of 0 is full
    attention; absent blocks are not seen. A context of length 0 gives o = 0, lse = -inf."""
    assert layer.full_v is not None, "this layer is latent; call decode_attn_latent"
    if runs_triton(implementation, q):
        from engine.kernels.decode_attn_tiered.kernel import decode_attn_triton

        return decode_attn_triton(q, layer, layer.full_v.shape[3], lengths, starts, scale)
    return decode_attn_reference(q, layer, lengths, starts, scale, layer.full_v.shape[3])
