"""Routed SwiGLU experts in three launches: gate and up with the gating, down with the routing
weight, and the sum over a row's experts in a fixed order (no atomics, so bits repeat)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import SETTINGS, dot_mode, launch
from engine.kernels.tiled import dot


@triton.jit
def up_kernel(
    x,
    source,
    experts,
    gate_up,
    middle,
    num_rows,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:  # the number of tiles is a bound, known without asking the GPU
        return
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(source + place).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    base = gate_up + expert * 2 * WIDTH * H
    for begin in range(0, H, BLOCK_K):
        inner = begin + tl.arange(0, BLOCK_K)
        known = (row[:, None] >= 0) & (inner[None, :] < H)
        part = tl.load(x + row[:, None] * H + inner[None, :], mask=known, other=0).to(tl.float32)
        at = column[None, :] * H + inner[:, None]
        inside = (column[None, :] < WIDTH) & (inner[:, None] < H)
        matrix = tl.load(base + at, mask=inside, other=0).to(tl.float32)
        gate += dot(part, matrix, DOT)
        matrix = tl.load(base + WIDTH * H + at, mask=inside, other=0).to(tl.float32)
        up += dot(part, matrix, DOT)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    store = (place[:, None] < num_rows) & (column[None, :] < WIDTH)
    tl.store(middle + place[:, None] * WIDTH + column[None, :], gated, mask=store)


@triton.jit
def down_kernel(
    middle,
    share,
    experts,
    down,
    out,
    num_rows,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    base = down + expert * H * WIDTH
    for begin in range(0, WIDTH, BLOCK_K):
        inner = begin + tl.arange(0, BLOCK_K)
        known = (place[:, None] < num_rows) & (inner[None, :] < WIDTH)
        at = middle + place[:, None] * WIDTH + inner[None, :]
        part = tl.load(at, mask=known, other=0).to(tl.float32)
        inside = (column[None, :] < H) & (inner[:, None] < WIDTH)
        matrix = tl.load(base + column[None, :] * WIDTH + inner[:, None], mask=inside, other=0)
        acc += dot(part, matrix.to(tl.float32), DOT)
    weight = tl.load(share + place, mask=place < num_rows, other=0).to(tl.float32)
    store = (place[:, None] < num_rows) & (column[None, :] < H)
    tl.store(out + place[:, None] * H + column[None, :], acc * weight[:, None], mask=store)


@triton.jit
def combine_kernel(parts, places, out, H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_H], tl.float32)
    for k in range(K):
        place = tl.load(places + row * K + k)
        acc += tl.load(parts + place * H + channel, mask=channel < H, other=0)
    tl.store(out + row * H + channel, acc, mask=channel < H)


def lay_out(used: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert, every group padded to whole tiles, without waiting for the device.

    used int64 [N, K] -> (source int64 [P]: row of each place, -1 for padding; places int64 [N * K];
    experts int64 [P / tile]: expert of each tile, -1 for tiles beyond the last)."""
    flat = used.flatten()
    num_tiles = min(len(flat), len(flat) // tile + num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=used.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + tile - 1) // tile
    ends = tiles.cumsum(0)
    shift = (ends - tiles) * tile - (counts.cumsum(0) - counts)
    order = flat.argsort(stable=True)
    sorted_places = torch.arange(len(flat), device=used.device) + shift[flat[order]]
    source = torch.full((num_tiles * tile,), -1, dtype=torch.int64, device=used.device)
    source[sorted_places] = order // used.shape[1]
    places = torch.empty_like(flat)
    places[order] = sorted_places
    number = torch.arange(num_tiles, device=used.device)
    experts = torch.searchsorted(ends, number, right=True)
    return source, places, torch.where(number < ends[-1], experts, -1)


def moe_grouped_gemm_triton(
    x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """See ``moe_grouped_gemm``."""
    rows, hidden = x.shape
    width, sizes = down.shape[2], SETTINGS["moe_up"].sizes
    tile, columns = sizes["BLOCK_M"], sizes["BLOCK_N"]
    assert SETTINGS["moe_down"].sizes["BLOCK_M"] == tile, "rows are laid out once for both"
    out = torch.empty_like(x)
    if not rows:
        return out
    source, places, experts = lay_out(used, len(down), tile)
    share = torch.zeros(len(source), dtype=torch.float32, device=x.device)
    share[places] = weights.flatten().float()
    middle = torch.empty(len(source), width, dtype=x.dtype, device=x.device)
    parts = torch.empty(len(source), hidden, dtype=torch.float32, device=x.device)
    sides = {"H": hidden, "WIDTH": width, "DOT": dot_mode(x.dtype, compute_bound=True)}
    launch(
        "moe_up",
        up_kernel,
        (len(experts), -(-width // columns)),
        x.contiguous(),
        source,
        experts,
        gate_up.contiguous(),
        middle,
        len(source),
        **sides,
    )
    launch(
        "moe_down",
        down_kernel,
        (len(experts), -(-hidden // SETTINGS["moe_down"].sizes["BLOCK_N"])),
        middle,
        share,
        experts,
        down.contiguous(),
        parts,
        len(source),
        **sides,
    )
    launch(
        "moe_combine",
        combine_kernel,
        (rows, -(-hidden // 512)),
        parts,
        places,
        out,
        H=hidden,
        K=used.shape[1],
        BLOCK_H=512,
    )
    return out
