"""Attention over chosen positions: one program a list, for the query heads that share it, 16 of
them where the layer is latent."""

# constants of kernels are typed as if only constexpr could be passed
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import dot_mode, launch, padded
from engine.kernels.tiered import LATENT_ROWS, TieredLayer
from engine.kernels.tiled import (
    attend_tile,
    dot,
    key_tile,
    nothing_seen,
    queries,
    query_rows,
    query_tile,
    store_rows,
)

SCORED_CHANNELS = 128
"""Channels of a key that are scored at a time: those of latent layers are many."""


@triton.jit
def find(positions, table, tiers, n, head, at, count, width, G: tl.constexpr):
    """Row, tier and offset of 32 listed positions; tier 2 where there is none."""
    position = tl.load(positions + at, mask=count, other=-1)
    listed = position >= 0
    block = tl.where(listed, position // 32, 0)
    tier = tl.load(tiers + n * width + block, mask=listed, other=2).to(tl.int32)
    slot = tl.load(table + n * width + block, mask=listed, other=0).to(tl.int64)
    return slot * G + head, tier, tl.where(listed, position % 32, 0)


@triton.jit
def gathered_attn_kernel(
    q,
    keys,
    values,
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
    BLOCK_P: tl.constexpr,
    LATENT: tl.constexpr,
    DOT: tl.constexpr,
):
    which, row, known = query_rows(R, BLOCK_R)
    n, head = which // H, (which % H) // (H // G)
    token = tl.arange(0, 32)
    query, rest = queries(q, row, known, factor, D, V, BLOCK_D, BLOCK_P, LATENT)
    peak, total, acc = nothing_seen(BLOCK_R, BLOCK_V)
    for begin in range(0, count, 32):
        at = which * count + begin + token
        slot, tier, offset = find(
            positions, table, tiers, n, head, at, begin + token < count, width, G
        )
        peak, total, acc = attend_tile(
            query, rest, keys, values, slot, tier, offset, tier < 2, peak, total, acc,
            D, V, BITS, BLOCK_D, BLOCK_V, BLOCK_P, False, LATENT, DOT,
        )  # fmt: skip
    store_rows(out, lse, row, known, peak, total, acc, V, BLOCK_V)


@triton.jit
def gathered_scores_kernel(
    q,
    keys,
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
    which, row, known = query_rows(R, BLOCK_R)
    n, head = which // H, (which % H) // (H // G)
    token = tl.arange(0, 32)
    begin = tl.program_id(1) * 32
    listed = begin + token < count
    at = which * count + begin + token
    slot, tier, offset = find(positions, table, tiers, n, head, at, listed, width, G)
    logits = tl.zeros([BLOCK_R, 32], tl.float32)
    for part in range(0, D, BLOCK_D):
        channel = part + tl.arange(0, BLOCK_D)
        query = query_tile(q, row, known, channel, channel < D, factor, D)
        k = key_tile(keys, slot, tier, offset, tier < 2, channel, channel < D, D, BLOCK_D, False)
        logits += dot(query, k, DOT)
    scores = tl.where((tier < 2)[None, :], logits, float("-inf"))
    place = row[:, None] * count + begin + token[None, :]
    tl.store(out + place, scores, mask=known[:, None] & listed[None, :])


def gathered_scores_triton(
    q: Tensor, layer: TieredLayer, positions: Tensor, scale: float
) -> Tensor:
    """See ``gathered_scores``."""
    contexts, heads, size = q.shape
    lists, count = positions.shape[1:]
    out = torch.empty(contexts, heads, count, dtype=torch.float32, device=q.device)
    rows = heads // lists
    tile = LATENT_ROWS if layer.is_latent else padded(rows)
    launch(
        "gathered_scores",
        gathered_scores_kernel,
        (contexts * lists * -(-rows // tile), -(-count // 32)),
        q.contiguous(),
        layer.key_tensors(),
        layer.table,
        layer.tiers,
        positions.contiguous(),
        out,
        float(scale),
        layer.table.shape[1],
        count,
        H=lists,
        G=layer.groups,
        R=rows,
        D=size,
        BLOCK_R=tile,
        BLOCK_D=min(padded(size), SCORED_CHANNELS),
        DOT=dot_mode(q.dtype),
    )
    return out


def gathered_attn_triton(
    q: Tensor, layer: TieredLayer, positions: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """See ``gathered_attn``."""
    contexts, heads, _ = q.shape
    lists, count = positions.shape[1:]
    out = torch.empty(contexts, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(contexts, heads, dtype=torch.float32, device=q.device)
    sides = layer.sides(heads // lists, value_dim)
    launch(
        "gathered_attn_latent" if layer.is_latent else "gathered_attn",
        gathered_attn_kernel,
        (contexts * lists * sides.tiles,),
        q.contiguous(),
        layer.key_tensors(),
        layer.value_tensors(),
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
        DOT=dot_mode(q.dtype),
        **sides.constants,
    )
    return out, lse
