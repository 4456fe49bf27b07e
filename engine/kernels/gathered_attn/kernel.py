"""Attention over chosen positions: one program a list, for the query heads that share it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import dot_mode, launch, padded
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
def find(positions, table, tiers, n, head, at, count, width, G: tl.constexpr):
    """Row, offset and tier of 32 listed positions; tier 2 where there is none."""
    position = tl.load(positions + at, mask=count, other=-1)
    listed = position >= 0
    block = tl.where(listed, position // 32, 0)
    tier = tl.load(tiers + n * width + block, mask=listed, other=2).to(tl.int32)
    slot = tl.load(table + n * width + block, mask=listed, other=0).to(tl.int64)
    return slot * G + head, tl.where(listed, position % 32, 0), tier


@triton.jit
def gathered_attn_kernel(
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
    positions,
    out,
    lse,
    factor,
    width,
    count,
    H: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    n = pid // H
    head = (pid % H) // (H // G)
    row = tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_D)
    value = tl.arange(0, BLOCK_V)
    token = tl.arange(0, 32)
    inside = (row[:, None] < R) & (channel[None, :] < D)
    q_at = q + (pid * R + row[:, None]) * D + channel[None, :]
    query = tl.load(q_at, mask=inside, other=0).to(tl.float32) * factor
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for begin in range(0, count, 32):
        at = pid * count + begin + token
        slot, offset, tier = find(
            positions, table, tiers, n, head, at, begin + token < count, width, G
        )
        known = channel[:, None] < D
        warm, full = known & (tier == 1)[None, :], known & (tier == 0)[None, :]
        slots, offsets = slot[None, :], offset[None, :]
        k = warm_keys(
            top, mid, low, key_min, key_scale, slots, channel[:, None], offsets, warm, warm, D
        )
        k += full_keys(full_k, slots, channel[:, None], offsets, full, D)
        known_v = value[None, :] < V
        warm_v, full_v_mask = (tier == 1)[:, None] & known_v, (tier == 0)[:, None] & known_v
        v = warm_values(
            codes,
            value_scale,
            value_min,
            slot[:, None],
            offset[:, None],
            value[None, :],
            warm_v,
            V,
            BITS,
        )
        v += full_values(full_v, slot[:, None], offset[:, None], value[None, :], full_v_mask, V)
        scores = tl.where((tier < 2)[None, :], dot(query, k, DOT), float("-inf"))
        peak, total, acc = fold(scores, v, peak, total, acc, DOT)
    o, log_sum = finish(peak, total, acc)
    place = pid * R + row
    store = (row[:, None] < R) & (value[None, :] < V)
    tl.store(out + place[:, None] * V + value[None, :], o, mask=store)
    tl.store(lse + place, log_sum, mask=row < R)


@triton.jit
def gathered_scores_kernel(
    q,
    full_k,
    top,
    mid,
    low,
    key_min,
    key_scale,
    table,
    tiers,
    positions,
    out,
    factor,
    width,
    count,
    H: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * 32
    n = pid // H
    head = (pid % H) // (H // G)
    row = tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_D)
    token = tl.arange(0, 32)
    inside = (row[:, None] < R) & (channel[None, :] < D)
    q_at = q + (pid * R + row[:, None]) * D + channel[None, :]
    query = tl.load(q_at, mask=inside, other=0).to(tl.float32) * factor
    listed = begin + token < count
    at = pid * count + begin + token
    slot, offset, tier = find(positions, table, tiers, n, head, at, listed, width, G)
    known = channel[:, None] < D
    warm, full = known & (tier == 1)[None, :], known & (tier == 0)[None, :]
    slots, offsets = slot[None, :], offset[None, :]
    k = warm_keys(
        top, mid, low, key_min, key_scale, slots, channel[:, None], offsets, warm, warm, D
    )
    k += full_keys(full_k, slots, channel[:, None], offsets, full, D)
    scores = tl.where((tier < 2)[None, :], dot(query, k, DOT), float("-inf"))
    place = (pid * R + row[:, None]) * count + begin + token[None, :]
    tl.store(out + place, scores, mask=(row[:, None] < R) & listed[None, :])


def gathered_scores_triton(
    q: Tensor, layer: TieredLayer, positions: Tensor, scale: float
) -> Tensor:
    """See ``gathered_scores``."""
    contexts, heads, size = q.shape
    lists, count = positions.shape[1:]
    out = torch.empty(contexts, heads, count, dtype=torch.float32, device=q.device)
    launch(
        "gathered_scores",
        gathered_scores_kernel,
        (contexts * lists, -(-count // 32)),
        q.contiguous(),
        layer.full_k,
        layer.keys.top,
        layer.keys.mid,
        layer.keys.low,
        layer.keys.minimum.contiguous(),
        layer.keys.scale.contiguous(),
        layer.table,
        layer.tiers,
        positions.contiguous(),
        out,
        float(scale),
        layer.table.shape[1],
        count,
        H=lists,
        G=layer.groups,
        R=heads // lists,
        D=size,
        BLOCK_R=padded(heads // lists),
        BLOCK_D=padded(size),
        DOT=dot_mode(q.dtype),
    )
    return out


def gathered_attn_triton(
    q: Tensor, layer: TieredLayer, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``gathered_attn``."""
    assert layer.full_v is not None and layer.values is not None, "latent layers have no kernel"
    contexts, heads, size = q.shape
    lists, count = positions.shape[1:]
    value_dim = layer.full_v.shape[3]
    out = torch.empty(contexts, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(contexts, heads, dtype=torch.float32, device=q.device)
    value_scale, value_min = layer.values.scale.contiguous(), layer.values.minimum
    launch(
        "gathered_attn",
        gathered_attn_kernel,
        (contexts * lists,),
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
        positions.contiguous(),
        out,
        lse,
        float(scale),
        layer.table.shape[1],
        count,
        H=lists,
        G=layer.groups,
        R=heads // lists,
        D=size,
        V=value_dim,
        BITS=layer.value_bits,
        BLOCK_R=padded(heads // lists),
        BLOCK_D=padded(size),
        BLOCK_V=padded(value_dim),
        DOT=dot_mode(q.dtype),
    )
    return out, lse
