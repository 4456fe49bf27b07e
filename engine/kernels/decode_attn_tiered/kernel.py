"""Attention of one query a context over sink and window, split over keys: a program reads some
blocks for the query heads of one key-value head, 16 of them where the layer is latent; the splits
are merged afterwards.

How keys are split depends on a context's own length alone, so a row's bits do not depend on what
else is in the batch: splits beyond its own see nothing and add exact zeros.
"""

# constants of kernels are typed as if only constexpr could be passed
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import (
    MAX_SPLITS,
    MIN_BLOCKS_PER_SPLIT,
    dot_mode,
    launch,
    num_splits,
)
from engine.kernels.lse_merge.kernel import lse_merge_triton
from engine.kernels.tiered import TieredLayer
from engine.kernels.tiled import attend_tile, nothing_seen, queries, query_rows, store_rows


@triton.jit
def decode_attn_kernel(
    q,
    keys,
    values,
    table,
    tiers,
    lengths,
    starts,
    out,
    lse,
    factor,
    width,
    num_rows,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BITS: tl.constexpr,
    SMALLEST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LATENT: tl.constexpr,
    DOT: tl.constexpr,
):
    pair, row, known = query_rows(R, BLOCK_R)
    n, head = pair // G, pair % G
    split = tl.program_id(1)
    length = tl.load(lengths + n).to(tl.int32)
    start = tl.load(starts + n).to(tl.int32)
    token = tl.arange(0, 32)
    query, rest = queries(q, row, known, factor, D, V, BLOCK_D, BLOCK_P, LATENT)

    # visible blocks: the sink, then first .. the last one
    first = tl.maximum(start, 32) // 32
    count = tl.minimum((length + 31) // 32, 1) + tl.maximum((length + 31) // 32 - first, 0)
    share = tl.maximum((count + SPLITS - 1) // SPLITS, SMALLEST)
    peak, total, acc = nothing_seen(BLOCK_R, BLOCK_V)
    for m in range(split * share, tl.minimum(split * share + share, count)):
        j = tl.where(m == 0, 0, first + m - 1)
        slot = tl.load(table + n * width + j).to(tl.int64) * G + head
        tier = tl.load(tiers + n * width + j).to(tl.int32)
        position = j * 32 + token
        seen = (position < length) & ((position < 32) | (position >= start))
        seen = seen & (tier + token * 0 < 2)
        peak, total, acc = attend_tile(
            query, rest, keys, values, slot, tier, token, seen, peak, total, acc,
            D, V, BITS, BLOCK_D, BLOCK_V, BLOCK_P, True, LATENT, DOT,
        )  # fmt: skip
    at = split.to(tl.int64) * num_rows + row
    store_rows(out, lse, at, known, peak, total, acc, V, BLOCK_V)


def decode_attn_triton(
    q: Tensor,
    layer: TieredLayer,
    value_dim: int,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    name: str = "decode_attn_tiered",
) -> tuple[Tensor, Tensor]:
    """See ``decode_attn_tiered``; of latent layers ``decode_attn_latent``."""
    contexts, heads, _ = q.shape
    groups, width = layer.groups, layer.table.shape[1]
    splits = num_splits(width)
    kind = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(splits, contexts, heads, value_dim, **kind)
    lse = torch.empty(splits, contexts, heads, **kind)
    sides = layer.sides(heads // groups, value_dim)
    launch(
        name,
        decode_attn_kernel,
        (contexts * groups * sides.tiles, splits),
        q.contiguous(),
        layer.key_tensors(),
        layer.value_tensors(),
        layer.table,
        layer.tiers,
        lengths,
        starts,
        out,
        lse,
        float(scale),
        width,
        contexts * heads,
        G=groups,
        R=heads // groups,
        SMALLEST=MIN_BLOCKS_PER_SPLIT,
        SPLITS=MAX_SPLITS,
        DOT=dot_mode(q.dtype),
        **sides.constants,
    )
    return (out[0], lse[0]) if splits == 1 else lse_merge_triton(out, lse)
