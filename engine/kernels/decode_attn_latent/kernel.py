"""Latent attention in its absorbed form: all heads share one key [latent | rotated], whose latent
is also the value, so a program loads a block once for 16 heads and uses it twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import dot_mode, launch, num_splits, padded
from engine.kernels.lse_merge.kernel import lse_merge_triton
from engine.kernels.tiered import TieredLayer
from engine.kernels.tiled import dot, finish, fold, full_keys, warm_keys


@triton.jit
def decode_latent_kernel(
    q,
    full_k,
    top,
    mid,
    low,
    key_min,
    key_scale,
    table,
    tiers,
    lengths,
    starts,
    out,
    lse,
    factor,
    width,
    num_rows,
    A: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
):
    tiles = (A + BLOCK_A - 1) // BLOCK_A
    pid = tl.program_id(0).to(tl.int64)
    n, tile = pid // tiles, pid % tiles
    split = tl.program_id(1)
    length = tl.load(lengths + n).to(tl.int32)
    start = tl.load(starts + n).to(tl.int32)
    row = tile * BLOCK_A + tl.arange(0, BLOCK_A)
    latent = tl.arange(0, BLOCK_V)
    rotated = V + tl.arange(0, BLOCK_P)
    token = tl.arange(0, 32)
    q_at = q + (n * A + row[:, None]) * D
    known = row[:, None] < A
    q_latent = tl.load(q_at + latent[None, :], mask=known & (latent[None, :] < V), other=0)
    q_rotated = tl.load(q_at + rotated[None, :], mask=known & (rotated[None, :] < D), other=0)
    q_latent = q_latent.to(tl.float32) * factor
    q_rotated = q_rotated.to(tl.float32) * factor

    first = tl.maximum(start, 32) // 32
    count = tl.minimum((length + 31) // 32, 1) + tl.maximum((length + 31) // 32 - first, 0)
    share = (count + SPLITS - 1) // SPLITS
    peak = tl.full([BLOCK_A], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_A], tl.float32)
    acc = tl.zeros([BLOCK_A, BLOCK_V], tl.float32)
    for m in range(split * share, tl.minimum(split * share + share, count)):
        j = tl.where(m == 0, 0, first + m - 1)
        slot = tl.load(table + n * width + j).to(tl.int64)
        tier = tl.load(tiers + n * width + j).to(tl.int32)
        position = j * 32 + token
        seen = (position < length) & ((position < 32) | (position >= start))
        seen = seen & (tier + token * 0 < 2)
        at, lane = latent[:, None], token[None, :]
        known_v, known_p = at < V, rotated[:, None] < D
        k = tl.zeros([BLOCK_V, 32], tl.float32)
        p = tl.zeros([BLOCK_P, 32], tl.float32)
        valid_v, valid_p = known_v & seen[None, :], known_p & seen[None, :]
        if tier == 1:
            k = warm_keys(top, mid, low, key_min, key_scale, slot, at, lane, valid_v, known_v, D)
            p = warm_keys(
                top, mid, low, key_min, key_scale, slot, rotated[:, None], lane, valid_p, known_p, D
            )
        if tier == 0:
            k = full_keys(full_k, slot, at, lane, valid_v, D)
            p = full_keys(full_k, slot, rotated[:, None], lane, valid_p, D)
        logits = dot(q_latent, k, DOT) + dot(q_rotated, p, DOT)
        scores = tl.where(seen[None, :], logits, float("-inf"))
        peak, total, acc = fold(scores, tl.trans(k), peak, total, acc, DOT)
    o, log_sum = finish(peak, total, acc)
    at_row = split.to(tl.int64) * num_rows + n * A + row
    store = known & (latent[None, :] < V)
    tl.store(out + at_row[:, None] * V + latent[None, :], o, mask=store)
    tl.store(lse + at_row, log_sum, mask=row < A)


def decode_latent_triton(
    q: Tensor, layer: TieredLayer, rank: int, lengths: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``decode_attn_latent``."""
    contexts, heads, size = q.shape
    width = layer.table.shape[1]
    splits = num_splits(width)
    kind = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(splits, contexts, heads, rank, **kind)
    lse = torch.empty(splits, contexts, heads, **kind)
    launch(
        "decode_attn_latent",
        decode_latent_kernel,
        (contexts * -(-heads // 16), splits),
        q.contiguous(),
        layer.full_k,
        layer.keys.top,
        layer.keys.mid,
        layer.keys.low,
        layer.keys.minimum.contiguous(),
        layer.keys.scale.contiguous(),
        layer.table,
        layer.tiers,
        lengths,
        starts,
        out,
        lse,
        float(scale),
        width,
        contexts * heads,
        A=heads,
        D=size,
        V=rank,
        SPLITS=splits,
        BLOCK_A=16,
        BLOCK_V=padded(rank),
        BLOCK_P=padded(size - rank),
        DOT=dot_mode(q.dtype),
    )
    return (out[0], lse[0]) if splits == 1 else lse_merge_triton(out, lse)
