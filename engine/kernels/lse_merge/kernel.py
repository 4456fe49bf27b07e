"""Merging attention over disjoint parts: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import launch, padded
from engine.kernels.tiled import finite


@triton.jit
def lse_merge_kernel(
    parts, lses, out, lse, num_rows, P: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_V)
    peak = tl.full([1], float("-inf"), tl.float32)
    for p in range(P):
        peak = tl.maximum(peak, tl.load(lses + (row * 0 + p) * num_rows + row).to(tl.float32))
    base = finite(peak)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for p in range(P):
        place = (row * 0 + p) * num_rows + row
        weight = tl.exp(tl.load(lses + place).to(tl.float32) - base)
        part = tl.load(parts + place * V + channel, mask=channel < V, other=0).to(tl.float32)
        total += weight
        acc += tl.where(weight > 0, weight * part, 0.0)
    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)
    tl.store(out + row * V + channel, acc, mask=channel < V)
    merged = tl.where(seen, base + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + row + tl.arange(0, 1), merged)


def lse_merge_triton(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See ``lse_merge``."""
    num_parts, num_rows, size = len(parts), lses[0].numel(), parts.shape[-1]
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=parts.device)
    launch(
        "lse_merge",
        lse_merge_kernel,
        (num_rows,),
        parts.contiguous(),
        lses.contiguous(),
        out,
        lse,
        num_rows,
        P=num_parts,
        V=size,
        BLOCK_V=padded(size),
    )
    return out, lse
