"""Latent attention in its absorbed form: the twin reads values from keys."""

from engine.kernels.decode_attn_tiered.reference import decode_attn_reference

__all__ = ["decode_attn_reference"]
