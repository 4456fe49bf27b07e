"""Attention of one query a context over sink and window, split over keys: a program reads some
blocks for all query heads of one key-value head; the splits are merged afterwards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import dot_mode, launch, num_splits, padded
from engine.kernels.lse_merge.kernel import lse_merge_triton
from engine.kernels.tiered import TieredLayer
from engine.kernels.tiled import (
    dot,
    finish,
    fold,
    full_keys,
    full_values,
    warm_keys,
    warm_values,
)


@triton.jit
def decode_attn_kernel(
    q,
    full_k,
    full_v,
    top,
    mid,
    low,
    key_min,
    key_scale,
    codes,
    value_scale,
    value_min,
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
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    n, head = pid // G, pid % G
    split = tl.program_id(1)
    length = tl.load(lengths + n).to(tl.int32)
    start = tl.load(starts + n).to(tl.int32)
    row = tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_D)
    value = tl.arange(0, BLOCK_V)
    token = tl.arange(0, 32)
    inside = (row[:, None] < R) & (channel[None, :] < D)
    q_at = q + (pid * R + row[:, None]) * D + channel[None, :]
    query = tl.load(q_at, mask=inside, other=0).to(tl.float32) * factor

    # visible blocks: the sink, then first .. the last one
    first = tl.maximum(start, 32) // 32
    count = tl.minimum((length + 31) // 32, 1) + tl.maximum((length + 31) // 32 - first, 0)
    share = (count + SPLITS - 1) // SPLITS
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for m in range(split * share, tl.minimum(split * share + share, count)):
        j = tl.where(m == 0, 0, first + m - 1)
        slot = tl.load(table + n * width + j).to(tl.int64) * G + head
        tier = tl.load(tiers + n * width + j).to(tl.int32)
        position = j * 32 + token
        seen = (position < length) & ((position < 32) | (position >= start))
        seen = seen & (tier + token * 0 < 2)
        key_valid = (channel[:, None] < D) & seen[None, :]
        value_valid = seen[:, None] & (value[None, :] < V)
        k = tl.zeros([BLOCK_D, 32], tl.float32)
        v = tl.zeros([32, BLOCK_V], tl.float32)
        if tier == 1:
            k = warm_keys(
                top,
                mid,
                low,
                key_min,
                key_scale,
                slot,
                channel[:, None],
                token[None, :],
                key_valid,
                channel[:, None] < D,
                D,
            )
            v = warm_values(
                codes,
                value_scale,
                value_min,
                slot,
                token[:, None],
                value[None, :],
                value_valid,
                V,
                BITS,
            )
        if tier == 0:
            k = full_keys(full_k, slot, channel[:, None], token[None, :], key_valid, D)
            v = full_values(full_v, slot, token[:, None], value[None, :], value_valid, V)
        scores = tl.where(seen[None, :], dot(query, k, DOT), float("-inf"))
        peak, total, acc = fold(scores, v, peak, total, acc, DOT)
    o, log_sum = finish(peak, total, acc)
    at = split.to(tl.int64) * num_rows + pid * R + row
    tl.store(
        out + at[:, None] * V + value[None, :], o, mask=(row[:, None] < R) & (value[None, :] < V)
    )
    tl.store(lse + at, log_sum, mask=row < R)


def decode_attn_triton(
    q: Tensor, layer: TieredLayer, lengths: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``decode_attn_tiered``."""
    assert layer.full_v is not None and layer.values is not None, "latent: decode_attn_latent"
    contexts, heads, size = q.shape
    groups, width, value_dim = layer.groups, layer.table.shape[1], layer.full_v.shape[3]
    splits = num_splits(width)
    kind = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(splits, contexts, heads, value_dim, **kind)
    lse = torch.empty(splits, contexts, heads, **kind)
    value_scale = layer.values.scale.contiguous()
    value_min = layer.values.minimum
    launch(
        "decode_attn_tiered",
        decode_attn_kernel,
        (contexts * groups, splits),
        q.contiguous(),
        layer.full_k,
        layer.full_v,
        layer.keys.top,
        layer.keys.mid,
        layer.keys.low,
        layer.keys.minimum.contiguous(),
        layer.keys.scale.contiguous(),
        layer.values.codes,
        value_scale,
        value_scale if value_min is None else value_min.contiguous(),
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
        D=size,
        V=value_dim,
        BITS=layer.value_bits,
        SPLITS=splits,
        BLOCK_R=padded(heads // groups),
        BLOCK_D=padded(size),
        BLOCK_V=padded(value_dim),
        DOT=dot_mode(q.dtype),
    )
    return (out[0], lse[0]) if splits == 1 else lse_merge_triton(out, lse)
