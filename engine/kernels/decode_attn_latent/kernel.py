"""Latent attention in its absorbed form: all heads share one key [latent | rotated], whose latent
is also the value, so a program loads a block once for 16 heads and uses it twice. The kernel is
that of ``decode_attn_tiered`` with LATENT."""

from torch import Tensor

from engine.kernels.decode_attn_tiered.kernel import decode_attn_triton
from engine.kernels.tiered import TieredLayer


def decode_latent_triton(
    q: Tensor, layer: TieredLayer, rank: int, lengths: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``decode_attn_latent``."""
    return decode_attn_triton(q, layer, rank, lengths, starts, scale, "decode_attn_latent")
