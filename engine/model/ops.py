"""How rows are multiplied: one strategy for speed, one whose row bits depend on nothing else.

Shapes: N rows, K inputs, M outputs, A heads, E experts, C experts a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.experts import TILE, GroupedExperts, tiled_experts

__all__ = ["TILE", "FastOps", "RouteRule", "RowOps", "TiledOps", "pad_rows"]


@dataclass(frozen=True, slots=True)
class RouteRule:
    """How a router chooses, see engine.model.moe.Router."""

    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    scale: float


class RowOps(Protocol):
    row_multiple: int
    """Callers pad the number of rows to a multiple of this with zero rows."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K], weight [M, K] -> [N, M]."""
        ...

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """A matrix for each head: x [N, A, K], weight [A, M, K] -> [N, A, M]."""
        ...

    def route(self, logits: Tensor, bias: Tensor, rule: RouteRule) -> tuple[Tensor, Tensor] | None:
        """logits [N, E], bias [E] -> experts int64 [N, C] by rising id and their weights fp32
        [N, C], without gradient; None leaves it to the router's own steps."""
        ...

    def experts(
        self, x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Sum of weights [N, C] times SwiGLU experts used int64 [N, C]; x [N, K] -> [N, K]."""
        ...


class _StepwiseRouting:
    def route(self, logits: Tensor, bias: Tensor, rule: RouteRule) -> None:
        return None


class FastOps(_StepwiseRouting):
    """Whatever the library does with the whole batch; used by the learner."""

    row_multiple = 1

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    def experts(
        self, x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        return GroupedExperts.apply(x, used, weights, gate_up, down)


class TiledOps(_StepwiseRouting):
    """Every product is [TILE, K] x [K, M]: a row's bits do not know its neighbours.

    The padding to whole tiles also keeps elementwise kernels off their scalar tails, which round
    differently from their vector bodies (ATen uses Sleef in one and libm in the other).
    """

    row_multiple = TILE

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        n = x.shape[0]
        assert n % TILE == 0, f"{n} rows are not whole tiles of {TILE}"
        # one product a tile: the expanded weight is not copied
        tiles = x.view(-1, TILE, x.shape[1])
        shared = weight.t().expand(len(tiles), -1, -1)
        return torch.bmm(tiles, shared).view(n, weight.shape[0])

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = [self.linear(x[:, a].contiguous(), matrix) for a, matrix in enumerate(weight)]
        return torch.stack(rows, dim=1)

    def experts(
        self, x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        return tiled_experts(x, used, weights, gate_up, down, self.linear)


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """x [N, ...] with zero rows appended up to a multiple."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
