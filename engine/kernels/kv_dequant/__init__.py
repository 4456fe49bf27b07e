"""Numbers from codes, for spilling, tests and prefill over warm blocks."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.kv_dequant.reference import (
    dequantise_keys_reference,
    dequantise_values_reference,
)
from engine.kvcache.quantise import WarmKeys, WarmValues


def dequantise_keys(keys: WarmKeys, implementation: Implementation = "auto") -> Tensor:
    """fp32 [B, G, 32, D], bit-equal in both implementations."""
    if runs_triton(implementation, keys.top):
        from engine.kernels.kv_dequant.kernel import dequantise_keys_triton

        return dequantise_keys_triton(keys)
    return dequantise_keys_reference(keys)


def dequantise_values(values: WarmValues, implementation: Implementation = "auto") -> Tensor:
    """fp32 [B, G, 32, V], bit-equal in both implementations."""
    if runs_triton(implementation, values.codes):
        from engine.kernels.kv_dequant.kernel import dequantise_values_triton

        return dequantise_values_triton(values)
    return dequantise_values_reference(values)
