"""Mixture of experts with a sigmoid router whose bias only selects (facts 1.2).

Shapes: N token rows, H hidden, E experts, K experts a token, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.ops import RowOps


class DenseFFN(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are fused as [2I, H]."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: Tensor, ops: RowOps) -> Tensor:
        return swiglu(x, self.gate_up_proj, self.down_proj, ops)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, ops: RowOps) -> Tensor:
    gate, up = ops.linear(x, gate_up).chunk(2, dim=-1)
    # contiguous halves: elementwise kernels then see whole vectors whatever N is
    return ops.linear(F.silu(gate.contiguous()) * up.contiguous(), down)


class Router(nn.Module):
    """s = sigmoid(x W); top-K of s + bias; weights = s at the chosen / (sum + 1e-20) * scale."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.normalise = config.norm_topk_prob

    def forward(
        self, x: Tensor, ops: RowOps, replay: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> (own choice int64 [N, K], used experts [N, K], weights fp32 [N, K]).

        ``replay`` int64 [N, K] replaces the choice, never the weights: those are always the
        current router's scores at the used experts. Choices are sorted by expert id.
        """
        scores = torch.sigmoid(ops.linear(x.float(), self.weight.float()))
        biased = scores.detach() + self.e_score_correction_bias
        chosen = biased.topk(self.top_k, dim=-1).indices.sort(dim=-1).values
        used = chosen if replay is None else replay
        weights = scores.gather(1, used)
        if self.normalise:
            total = weights[:, :1]
            for k in range(1, self.top_k):  # a fixed order of additions
                total = total + weights[:, k : k + 1]
            weights = weights / (total + 1e-20)
        return chosen, used, weights * self.scale


class MoE(nn.Module):
    """Routed experts grouped by expert, plus a shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts_gate_up_proj = nn.Parameter(
            torch.empty(config.n_routed_experts, 2 * width, hidden)
        )
        self.experts_down_proj = nn.Parameter(torch.empty(config.n_routed_experts, hidden, width))
        self.shared_experts = (
            DenseFFN(hidden, width * config.n_shared_experts) if config.n_shared_experts else None
        )

    def forward(
        self, x: Tensor, ops: RowOps, replay: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [N, H] -> (output [N, H], the router's own choice int64 [N, K])."""
        chosen, used, weights = self.gate(x, ops, replay)
        n, top_k = used.shape
        source, place, sizes = _group(used, self.gate.weight.shape[0], ops.row_multiple)
        grouped = x.index_select(0, source).split(sizes)
        gate_up = torch.cat(
            [
                ops.linear(rows, weight)
                for rows, weight in zip(grouped, self.experts_gate_up_proj, strict=True)
                if len(rows)
            ]
        )
        gate, up = gate_up.chunk(2, dim=-1)
        middle = (F.silu(gate.contiguous()) * up.contiguous()).split(sizes)
        result = torch.cat(
            [
                ops.linear(rows, weight)
                for rows, weight in zip(middle, self.experts_down_proj, strict=True)
                if len(rows)
            ]
        )
        picked = result.index_select(0, place).view(n, top_k, -1) * weights[:, :, None]
        out = picked[:, 0]
        for k in range(1, top_k):  # a fixed order of additions
            out = out + picked[:, k]
        if self.shared_experts is not None:
            out = out + self.shared_experts(x, ops)
        return out, chosen


def _group(used: Tensor, num_experts: int, multiple: int) -> tuple[Tensor, Tensor, list[int]]:
    """Lay rows out by expert, each group padded to ``multiple`` rows (with row 0, unused).

    used int64 [N, K] -> (source int64 [P]: the row at each place; place int64 [N * K]: where the
    k-th expert of a row computes it; rows of each group, E numbers that sum to P).
    """
    flat = used.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    sizes = (counts + multiple - 1) // multiple * multiple
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    places = torch.arange(len(flat)) + shift[flat[order]]
    source = flat.new_zeros(int(sizes.sum()))
    source[places] = order // used.shape[1]
    place = torch.empty_like(flat)
    place[order] = places
    return source, place, sizes.tolist()
