"""Attention of many queries a context with decode's masks: FlashAttention over a tile of queries of
one head; blocks that nobody in the tile sees are passed over, and of the two readings of a block,
exact and from codes, those that nobody needs."""

# tl.max is typed as if it might return a pair
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import SETTINGS, dot_mode, launch, padded
from engine.kernels.prefill_hybrid.reference import Visibility
from engine.kernels.tiled import dot, finish, finite


@triton.jit
def anywhere(mask):
    """Whether a mask [M, N] holds anywhere, a number."""
    return tl.max(tl.max(mask.to(tl.int32), axis=1), axis=0)


@triton.jit
def prefill_kernel(
    q,
    k,
    v,
    warm_k,
    warm_v,
    selected,
    firsts,
    counts,
    out,
    lse,
    factor,
    num_queries,
    num_keys,
    window,
    hot,
    dense_below,
    A: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    n, head = pid // A, pid % A
    group = head // (A // G)
    index = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    value = tl.arange(0, BLOCK_V)
    token = tl.arange(0, 32)
    first = tl.load(firsts + n).to(tl.int32)
    count = tl.minimum(tl.load(counts + n).to(tl.int32), num_queries)
    length = tl.where(index < count, first + index + 1, 0)
    query_row = (n * num_queries + index) * A + head
    q_mask = (index[:, None] < count) & (channel[None, :] < D)
    q_at = q + query_row[:, None] * D + channel[None, :]
    query = tl.load(q_at, mask=q_mask, other=0).to(tl.float32) * factor
    words = (num_keys + 31) // 32
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    longest = tl.minimum(tl.max(length, axis=0), num_keys)
    for begin in range(0, longest, 32):
        position = (begin + token)[None, :]
        t = length[:, None]
        seen = (position < 32) | (position >= t - window) | (t <= dense_below)
        if H > 0:
            list_row = (n * num_queries + index) * H + head // (A // H)
            bits_at = selected + list_row * words + begin // 32
            bits = tl.load(bits_at, mask=index < count, other=0)
            seen = seen | (((bits[:, None] >> token[None, :]) & 1) != 0)
        seen = seen & (position < t) & (position < num_keys)
        warm = (position >= 32) & (position < tl.maximum(t - hot, 0) // 32 * 32)
        if anywhere(seen) > 0:
            row = (n * num_keys + begin + token) * G + group
            # values of what is not seen may be NaN: they are not loaded unless somebody sees them
            coded, exact = anywhere(seen & warm) > 0, anywhere(seen & (warm == 0)) > 0
            there = begin + token < tl.minimum(longest, num_keys)
            k_mask = there[None, :] & (channel[:, None] < D)
            v_mask = there[:, None] & (value[None, :] < V)
            k_at = row[None, :] * D + channel[:, None]
            v_at = row[:, None] * V + value[None, :]
            scores = tl.full([BLOCK_M, 32], float("-inf"), tl.float32)
            if exact:
                tile = tl.load(k + k_at, mask=k_mask, other=0).to(tl.float32)
                scores = tl.where(seen & (warm == 0), dot(query, tile, DOT), scores)
            if coded:
                tile = tl.load(warm_k + k_at, mask=k_mask, other=0).to(tl.float32)
                scores = tl.where(seen & warm, dot(query, tile, DOT), scores)
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            base = finite(new_peak)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(peak - base)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            if exact:
                tile = tl.load(v + v_at, mask=v_mask, other=0).to(tl.float32)
                acc += dot(tl.where(warm, 0.0, weights), tile, DOT)
            if coded:
                tile = tl.load(warm_v + v_at, mask=v_mask, other=0).to(tl.float32)
                acc += dot(tl.where(warm, weights, 0.0), tile, DOT)
            peak = new_peak
    o, log_sum = finish(peak, total, acc)
    store = (index[:, None] < num_queries) & (value[None, :] < V)
    tl.store(out + query_row[:, None] * V + value[None, :], o, mask=store)
    tl.store(lse + query_row, log_sum, mask=index < num_queries)


def prefill_hybrid_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    warm_k: Tensor,
    warm_v: Tensor,
    selected: Tensor | None,
    firsts: Tensor,
    counts: Tensor,
    see: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See ``prefill_hybrid``."""
    contexts, queries, heads, size = q.shape
    value_dim = v.shape[3]
    kind = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(contexts, queries, heads, value_dim, **kind)
    lse = torch.empty(contexts, queries, heads, **kind)
    launch(
        "prefill_hybrid",
        prefill_kernel,
        (contexts * heads, -(-queries // SETTINGS["prefill_hybrid"].sizes["BLOCK_M"])),
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        warm_k.contiguous(),
        warm_v.contiguous(),
        # not read when there is no list
        firsts.to(torch.int32) if selected is None else selected.contiguous(),
        firsts.contiguous(),
        counts.contiguous(),
        out,
        lse,
        float(scale),
        queries,
        k.shape[1],
        see.window,
        see.hot,
        see.dense_below,
        A=heads,
        G=k.shape[2],
        H=0 if selected is None else selected.shape[2],
        D=size,
        V=value_dim,
        BLOCK_D=padded(size),
        BLOCK_V=padded(value_dim),
        DOT=dot_mode(q.dtype, compute_bound=True),
    )
    return out, lse
