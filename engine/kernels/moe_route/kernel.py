"""Choosing experts: one program a row. The best expert is taken K times; ranks within the chosen
set then give the order by id without sorting."""

# tl.max is typed as if it might return a pair
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import launch, padded


@triton.jit
def take_best(x, index, taken):
    """Index of the largest x [N] that is not taken, the lowest of equal ones."""
    left = tl.where(taken, float("-inf"), x)
    best = tl.max(left, axis=0)
    return tl.min(tl.where((left == best) & (taken == 0), index, 0x7FFFFFFF), axis=0)


@triton.jit
def moe_route_kernel(
    logits,
    bias,
    used,
    weights,
    factor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    expert = group[:, None] * SIZE + member[None, :]
    there = (group[:, None] < GROUPS) & (member[None, :] < SIZE)
    logit = tl.load(logits + row * GROUPS * SIZE + expert, mask=there, other=0).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-logit))
    shift = tl.load(bias + expert, mask=there, other=0).to(tl.float32)
    biased = tl.where(there, score + shift, float("-inf"))
    if GROUPS > 1:
        best = tl.max(biased, axis=1)
        # one of the best is put aside, not all that equal it
        where = tl.min(tl.where(biased == best[:, None], member[None, :], BLOCK_S), axis=1)
        rest = tl.where(member[None, :] == where[:, None], float("-inf"), biased)
        worth = best + tl.max(rest, axis=1)
        kept = group < 0
        for _ in range(TOP_GROUPS):
            kept = kept | (group == take_best(worth, group, kept | (group >= GROUPS)))
        biased = tl.where(kept[:, None], biased, float("-inf"))
    flat = tl.reshape(biased, (BLOCK_G * BLOCK_S,))
    index = tl.arange(0, BLOCK_G * BLOCK_S)
    absent = ((index // BLOCK_S) >= GROUPS) | ((index % BLOCK_S) >= SIZE)
    chosen = index < 0
    for _ in range(K):
        chosen = chosen | (index == take_best(flat, index, chosen | absent))
    # of the experts before mine, how many are chosen: padding lies between groups, never chosen
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    share = tl.where(chosen, tl.reshape(score, (BLOCK_G * BLOCK_S,)), 0.0)
    if NORMALISE:
        share = share / (tl.sum(share, axis=0) + 1e-20)
    ident = (index // BLOCK_S) * SIZE + index % BLOCK_S
    tl.store(used + row * K + rank, ident.to(tl.int64), mask=chosen)
    tl.store(weights + row * K + rank, share * factor, mask=chosen)


def moe_route_triton(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See ``moe_route``."""
    rows, experts = logits.shape
    used = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    launch(
        "moe_route",
        moe_route_kernel,
        (rows,),
        logits.contiguous(),
        bias.contiguous(),
        used,
        weights,
        float(scale),
        GROUPS=groups,
        SIZE=experts // groups,
        K=top_k,
        TOP_GROUPS=top_groups,
        NORMALISE=normalise,
        BLOCK_G=padded(groups, 1),
        BLOCK_S=padded(experts // groups, 2),
    )
    return used, weights
