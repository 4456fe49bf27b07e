"""Scoring far warm tokens by the top two bits of their codes: a program scores some blocks for all
query heads of one key-value head, so the plane is read once a group.

The arithmetic is that of engine.attention.codes, step by step, so scores are the same bits: a first
sum in 16 lanes and then halves, the rest in whole numbers."""

# tl.max is typed as if it might return a pair
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import SETTINGS, launch, padded
from engine.kernels.tiered import LATENT_ROWS, TieredLayer
from engine.kernels.tiled import quad_codes


@triton.jit
def first_sum(q_at, minimum, scale, at, factor, known, D: tl.constexpr, BLOCK_R: tl.constexpr):
    """sum of q * (minimum + 31.5 scale) over channels, [BLOCK_R]."""
    lane = tl.arange(0, 16)
    total = tl.zeros([BLOCK_R, 16], tl.float32)
    for begin in range(0, D, 16):
        channel = begin + lane
        inside = channel < D
        least = tl.load(minimum + at + channel, mask=inside, other=0).to(tl.float32)
        step = tl.load(scale + at + channel, mask=inside, other=0).to(tl.float32)
        q = tl.load(q_at + channel[None, :], mask=known & inside[None, :], other=0)
        total += q.to(tl.float32) * factor * (least + step * 31.5)[None, :]
    # of two numbers there is one order only
    halves = tl.sum(tl.reshape(total, (BLOCK_R, 2, 8)), axis=1)
    halves = tl.sum(tl.reshape(halves, (BLOCK_R, 2, 4)), axis=1)
    halves = tl.sum(tl.reshape(halves, (BLOCK_R, 2, 2)), axis=1)
    return tl.sum(halves, axis=1)


@triton.jit
def scaled_query(q_at, scale, at, channel, factor, known, D: tl.constexpr):
    """Queries times the block's scales, [BLOCK_R, C]."""
    inside = channel < D
    step = tl.load(scale + at + channel, mask=inside, other=0).to(tl.float32)
    query = tl.load(q_at + channel[None, :], mask=known & inside[None, :], other=0)
    return query.to(tl.float32) * factor * step[None, :]


@triton.jit
def code_scan_kernel(
    q,
    top,
    minimum,
    scale,
    table,
    tiers,
    starts,
    out,
    factor,
    width,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARE: tl.constexpr,
):
    tiles = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0).to(tl.int64)
    pair = pid // tiles
    n, head = pair // G, pair % G
    begin = tl.program_id(1) * BLOCKS
    start = tl.load(starts + n).to(tl.int32)
    token = tl.arange(0, 32)
    row = (pid % tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    known = row[:, None] < R
    q_at = q + (pair * R + row[:, None]) * D
    for j in range(begin, tl.minimum(begin + BLOCKS, width)):
        position = j * 32 + token
        scores = tl.full([BLOCK_R, 32], float("-inf"), tl.float32)
        tier = tl.load(tiers + n * width + j).to(tl.int32)
        # what is not warm, or near, is not loaded
        if (tier == 1) & (j > 0) & (j * 32 < start):
            slot = tl.load(table + n * width + j).to(tl.int64) * G + head
            at = slot * D
            peak = tl.zeros([BLOCK_R], tl.float32)
            for part in range(0, D, BLOCK_D):
                channel = part + tl.arange(0, BLOCK_D)
                products = scaled_query(q_at, scale, at, channel, factor, known, D)
                peak = tl.maximum(peak, tl.max(tl.abs(products), axis=1))
            peak = tl.where(peak < 1e-30, 0.0, peak)
            unit = tl.div_rn(tl.full([BLOCK_R], 127.0, tl.float32), tl.where(peak > 0, peak, 1.0))
            unit = tl.where(peak > 0, unit, 0.0)
            sums = tl.zeros([BLOCK_R, 32], tl.int32)
            for part in range(0, D, BLOCK_D):
                channel = part + tl.arange(0, BLOCK_D)
                products = scaled_query(q_at, scale, at, channel, factor, known, D)
                whole = products * unit[:, None]
                whole = (whole + 12582912.0) - 12582912.0
                valid = (channel[:, None] < D) & (token[None, :] >= 0)
                code = quad_codes(top, slot, channel[:, None], token[None, :], valid, D)
                sums += tl.dot(whole.to(tl.int8), code.to(tl.int8), out_dtype=tl.int32)
            first = first_sum(q_at, minimum, scale, at, factor, known, D, BLOCK_R)
            # 64 / 127: one unit of (int8 query x top bits), as a share of the peak
            scores = first[:, None] + (peak * 0.5039370078740157)[:, None] * sums.to(tl.float32)
            scores = tl.where((position < start)[None, :] & known, scores, float("-inf"))
        if SHARE:
            best = tl.max(scores, axis=0)
            tl.store(out + pid * width * 32 + position, best)
        else:
            at_row = (pair * R + row[:, None]) * width * 32
            tl.store(out + at_row + position[None, :], scores, mask=known & (token[None, :] >= 0))


def code_scan_triton(
    q: Tensor, layer: TieredLayer, starts: Tensor, scale: float, share: bool
) -> Tensor:
    """See ``code_scan``."""
    contexts, heads, size = q.shape
    groups, width = layer.groups, layer.table.shape[1]
    rows = heads // groups
    tile = LATENT_ROWS if layer.is_latent else padded(rows)
    tiles = -(-rows // tile)
    shape = (contexts, groups * tiles if share else heads, width * 32)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    blocks = SETTINGS["code_scan"].sizes["BLOCKS"]
    launch(
        "code_scan",
        code_scan_kernel,
        (contexts * groups * tiles, -(-width // blocks)),
        q.contiguous(),
        layer.keys.top,
        layer.keys.minimum.contiguous(),
        layer.keys.scale.contiguous(),
        layer.table,
        layer.tiers,
        starts,
        out,
        float(scale),
        width,
        G=groups,
        R=rows,
        D=size,
        BLOCK_R=tile,
        # integer products want 32 channels at least; the many of latent keys come in parts
        BLOCK_D=min(padded(size, 32), 128),
        SHARE=share,
    )
    return out.unflatten(1, (groups, tiles)).amax(dim=2) if share and tiles > 1 else out
