"""Coding blocks that leave the hot zone (formats: engine.kvcache.quantise)."""

from __future__ import annotations

from torch import Tensor

from engine.errors import QuantiseError
from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.kv_quantise_block.reference import (
    quantise_keys_reference,
    quantise_values_reference,
)
from engine.kvcache.quantise import BLOCK, Profile, WarmKeys, WarmValues


def kv_quantise_block(
    k: Tensor,
    v: Tensor | None,
    profile: Profile = "k8v8",
    implementation: Implementation = "auto",
    check: bool = True,
) -> tuple[WarmKeys, WarmValues | None]:
    """k [B, G, 32, D], v [B, G, 32, V] or None (latent attention) -> codes, bit-equal in both
    implementations. QuantiseError for numbers that have no code; on a GPU that check waits for the
    device, ``check=False`` leaves it out."""
    keys = quantise_keys(k, profile, implementation, check)
    return keys, None if v is None else quantise_values(v, profile, implementation, check)


def quantise_keys(
    k: Tensor,
    profile: Profile = "k8v8",
    implementation: Implementation = "auto",
    check: bool = True,
) -> WarmKeys:
    """See ``kv_quantise_block``."""
    if not runs_triton(implementation, k):
        return quantise_keys_reference(k, profile)
    from engine.kernels.kv_quantise_block.kernel import quantise_keys_triton

    _check_shape("keys", k, profile, 4)
    return quantise_keys_triton(k, profile, check)


def quantise_values(
    v: Tensor,
    profile: Profile = "k8v8",
    implementation: Implementation = "auto",
    check: bool = True,
) -> WarmValues:
    """See ``kv_quantise_block``."""
    if not runs_triton(implementation, v):
        return quantise_values_reference(v, profile)
    from engine.kernels.kv_quantise_block.kernel import quantise_values_triton

    _check_shape("values", v, profile, 2)
    return quantise_values_triton(v, profile, check)


def _check_shape(what: str, x: Tensor, profile: Profile, multiple: int) -> None:
    if profile == "full":
        raise QuantiseError(f"profile 'full' does not code {what}; keep them as they are")
    if x.ndim != 4 or x.shape[2] != BLOCK or x.shape[3] % multiple or not x.shape[3]:
        raise QuantiseError(
            f"{what} of shape {tuple(x.shape)} cannot be coded; expected [blocks, heads, {BLOCK}, "
            f"size] with a size that is a multiple of {multiple}"
        )
