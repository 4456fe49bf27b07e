"""Routed experts: rows grouped by expert, one matrix product an expert, no loop over tokens.

Shapes: N rows, H hidden, E experts, K experts a row, I expert width, P = N * K places. gate_up
[E, 2I, H] (gate, then up) and down [E, H, I]. A row's K experts are sorted by id, so adding block
after block adds each row's parts in the order of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32
"""Rows of a tile. BLAS picks kernels by shape, so a fixed shape fixes the order of additions."""


class GroupedExperts(torch.autograd.Function):
    """Forward and backward go expert by expert: a block of some hundred rows is gathered,
    multiplied and added while it is in the cache, and nothing of size P x H but the experts'
    outputs is kept. On a CPU this beats a fused grouped product, which streams P x H four times
    (engine/bench/experts.py)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        source, place, sizes = group(used, len(gate_up), 1)
        share = weights.new_empty(len(source), 1)
        share[place] = weights.reshape(-1, 1)
        width = down.shape[2]
        both = x.new_empty(len(source), 2 * width)
        result = x.new_empty(len(source), x.shape[1])
        out = weights.new_zeros(x.shape)  # fp32: the router's dtype
        for expert, block in _blocks(sizes):
            rows = x.index_select(0, source[block])
            torch.mm(rows, gate_up[expert].t(), out=both[block])
            torch.mm(_middle(both[block], width), down[expert].t(), out=result[block])
            out.index_add_(0, source[block], result[block] * share[block])
        ctx.save_for_backward(x, source, place, share, gate_up, down, both, result)
        ctx.sizes = sizes
        return out.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source, place, share, gate_up, down, both, result = ctx.saved_tensors
        grad_x = share.new_zeros(x.shape)
        grad_share = torch.empty_like(share)
        # an expert without rows keeps its zeros
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        width = down.shape[2]
        for expert, block in _blocks(ctx.sizes):
            rows = source[block]
            grad_out = grad.index_select(0, rows)
            torch.sum(grad_out * result[block], -1, keepdim=True, out=grad_share[block])
            grad_out = (grad_out * share[block]).to(x.dtype)
            gate, up = (half.contiguous() for half in both[block].split(width, dim=1))
            gated = F.silu(gate)
            torch.mm(grad_out.t(), gated * up, out=grad_down[expert])
            grad_middle = torch.mm(grad_out, down[expert])
            grad_gate = torch.ops.aten.silu_backward(grad_middle * up, gate)
            grad_both = torch.cat([grad_gate, grad_middle * gated], dim=1)
            torch.mm(grad_both.t(), x.index_select(0, rows), out=grad_gate_up[expert])
            grad_rows = torch.mm(grad_both, gate_up[expert])
            grad_x.index_add_(0, rows, grad_rows.to(grad_x.dtype))
        grad_weights = grad_share.index_select(0, place).view(len(x), -1)
        return grad_x.to(x.dtype), None, grad_weights, grad_gate_up, grad_down


def tiled_experts(
    x: Tensor,
    used: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    linear: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The same sum with every group padded to whole tiles, for a ``linear`` that wants them."""
    n, top_k = used.shape
    source, place, sizes = group(used, len(gate_up), TILE)

    def each(rows: Tensor, matrices: Tensor) -> Tensor:
        parts = zip(rows.split(sizes), matrices, strict=True)
        return torch.cat([linear(part, matrix) for part, matrix in parts if len(part)])

    both = each(x.index_select(0, source), gate_up)
    result = each(_middle(both, down.shape[2]), down)
    picked = result.index_select(0, place).view(n, top_k, -1) * weights[:, :, None]
    out = picked[:, 0]
    for k in range(1, top_k):  # a fixed order of additions
        out = out + picked[:, k]
    return out.to(x.dtype)


def _middle(both: Tensor, width: int) -> Tensor:
    gate, up = both.split(width, dim=1)
    # contiguous halves: elementwise kernels then see whole vectors whatever the number of rows
    return F.silu(gate.contiguous()) * up.contiguous()


def _blocks(sizes: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its places) of every expert that has rows."""
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def group(used: Tensor, num_experts: int, multiple: int) -> tuple[Tensor, Tensor, list[int]]:
    """Lay rows out by expert, each group padded to ``multiple`` rows (with row 0, unused).

    used int64 [N, K] -> (source int64 [P]: the row at each place; place int64 [N * K]: where the
    k-th expert of a row computes it; rows of each group, E numbers that sum to P).
    """
    flat = used.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    sizes = (counts + multiple - 1) // multiple * multiple
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    places = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    source = flat.new_zeros(int(sizes.sum()))
    source[places] = order // used.shape[1]
    place = torch.empty_like(flat)
    place[order] = places
    return source, place, sizes.tolist()
