"""Mixture of experts with a sigmoid router whose bias only selects (facts 1.2).

Shapes: N token rows, H hidden, E experts, K experts a token, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.ops import RowOps, pad_rows


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
        order = used.flatten().argsort(stable=True)
        counts = torch.bincount(used.flatten(), minlength=self.gate.weight.shape[0]).tolist()
        rows = order // top_k
        flat_weights = weights.flatten()[order]
        out = x.new_zeros(n, x.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            index = rows[start : start + count]
            part = pad_rows(x[index], ops.row_multiple)
            part = swiglu(
                part, self.experts_gate_up_proj[expert], self.experts_down_proj[expert], ops
            )[:count]
            out = out.index_add(0, index, part * flat_weights[start : start + count, None])
            start += count
        if self.shared_experts is not None:
            out = out + self.shared_experts(x, ops)
        return out, chosen
