"""Writing new keys and values into the hot zone."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.kv_append.reference import kv_append_reference


def kv_append(
    full_k: Tensor,
    full_v: Tensor | None,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    implementation: Implementation = "auto",
) -> None:
    """Write k [N, G, D] into full_k [S, G, 32, D] and v [N, G, V] into full_v [S, G, 32, V].

    They are rounded to the pool's type. slots int64 [N] = 32 * slot + offset, all different; -1
    skips a row. Values are None for latent attention."""
    if runs_triton(implementation, full_k):
        from engine.kernels.kv_append.kernel import kv_append_triton

        return kv_append_triton(full_k, full_v, slots, k, v)
    return kv_append_reference(full_k, full_v, slots, k, v)
