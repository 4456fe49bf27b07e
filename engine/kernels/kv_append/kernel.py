"""Writing new keys and values into their slots: one program a row and head, a plain copy."""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import launch, padded


@triton.jit
def kv_append_kernel(pool, slots, rows, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    n, head = pid // G, pid % G
    channel = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + n)
    place = ((slot // 32) * G + head) * 32 + slot % 32
    inside = (channel < D) & ((slot + channel) >= channel)
    # the type is not changed, so that bf16 is never rounded here
    number = tl.load(rows + pid * D + channel, mask=inside)
    tl.store(pool + place * D + channel, number, mask=inside)


def kv_append_triton(
    full_k: Tensor, full_v: Tensor | None, slots: Tensor, k: Tensor, v: Tensor | None
) -> None:
    """See ``kv_append``."""
    pairs = [(full_k, k)]
    if full_v is not None and v is not None:
        pairs.append((full_v, v))
    for pool, rows in pairs:
        assert pool.is_contiguous() and pool.shape[2] == 32, "pool is not [slots, G, 32, size]"
        launch(
            "kv_append",
            kv_append_kernel,
            (rows.shape[0] * rows.shape[1],),
            pool,
            slots.contiguous(),
            rows.to(pool.dtype).contiguous(),
            G=rows.shape[1],
            D=rows.shape[2],
            BLOCK_D=padded(rows.shape[2]),
        )
