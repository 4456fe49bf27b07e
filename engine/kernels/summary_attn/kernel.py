"""Attention over summaries of blocks: one program a key-value head."""

# tl.max is typed as if it might return a pair
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import dot_mode, launch, padded
from engine.kernels.tiled import dot, finish, fold


@triton.jit
def summary_attn_kernel(
    q,
    keys,
    values,
    counts,
    out,
    lse,
    factor,
    log_weight,
    num_blocks,
    R: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_D)
    value = tl.arange(0, BLOCK_V)
    lane = tl.arange(0, 32)
    known = row[:, None] < R
    q_at = q + (pid * R + row[:, None]) * D + channel[None, :]
    query = tl.load(q_at, mask=known & (channel[None, :] < D), other=0).to(tl.float32) * factor
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for begin in range(0, num_blocks, 32):
        block = begin + lane
        there = block < num_blocks
        count_at = counts + (pid * R + row[:, None]) * num_blocks + block[None, :]
        count = tl.load(count_at, mask=known & there[None, :], other=0).to(tl.float32)
        # a summary that no head counts is not read
        used = tl.max(count, axis=0) > 0
        at = pid * num_blocks + block
        k_at = keys + at[None, :] * D + channel[:, None]
        k = tl.load(k_at, mask=used[None, :] & (channel[:, None] < D), other=0).to(tl.float32)
        v_at = values + at[:, None] * V + value[None, :]
        v = tl.load(v_at, mask=used[:, None] & (value[None, :] < V), other=0).to(tl.float32)
        bias = tl.log(tl.where(count > 0, count, 1.0)) + log_weight
        scores = tl.where(count > 0, dot(query, k, DOT) + bias, float("-inf"))
        peak, total, acc = fold(scores, v, peak, total, acc, DOT)
    o, log_sum = finish(peak, total, acc)
    place = pid * R + row
    tl.store(out + place[:, None] * V + value[None, :], o, mask=known & (value[None, :] < V))
    tl.store(lse + place, log_sum, mask=row < R)


def summary_attn_triton(
    q: Tensor, keys: Tensor, values: Tensor, counts: Tensor, scale: float, weight: float
) -> tuple[Tensor, Tensor]:
    """See ``summary_attn``."""
    contexts, heads, size = q.shape
    groups, num_blocks, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    out = torch.zeros(contexts, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.full((contexts, heads), -math.inf, dtype=torch.float32, device=q.device)
    if weight == 0 or not num_blocks:
        return out, lse
    launch(
        "summary_attn",
        summary_attn_kernel,
        (contexts * groups,),
        q.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        counts.to(torch.int32).contiguous(),
        out,
        lse,
        float(scale),
        math.log(weight),
        num_blocks,
        R=heads // groups,
        D=size,
        V=value_dim,
        BLOCK_R=padded(heads // groups),
        BLOCK_D=padded(size),
        BLOCK_V=padded(value_dim),
        DOT=dot_mode(q.dtype),
    )
    return out, lse
