"""Writing new keys and values into their slots: the torch twin."""

from __future__ import annotations

from torch import Tensor


def kv_append_reference(
    full_k: Tensor, full_v: Tensor | None, slots: Tensor, k: Tensor, v: Tensor | None
) -> None:
    """See ``kv_append``."""
    size = full_k.shape[2]
    kept = slots >= 0
    block, offset = slots[kept] // size, slots[kept] % size
    full_k[block, :, offset] = k[kept].to(full_k.dtype)
    if full_v is not None and v is not None:
        full_v[block, :, offset] = v[kept].to(full_v.dtype)
