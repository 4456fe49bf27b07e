"""Mixture of experts with a sigmoid router whose bias only selects (facts 1.2).

Shapes: N token rows, H hidden, E experts, K experts a token, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.ops import RouteRule, RowOps


class DenseFFN(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are fused as [2I, H]."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: Tensor, ops: RowOps) -> Tensor:
        gate, up = ops.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        # contiguous halves: elementwise kernels then see whole vectors whatever N is
        return ops.linear(F.silu(gate.contiguous()) * up.contiguous(), self.down_proj)


class Router(nn.Module):
    """s = sigmoid(x W); top-K of s + bias; weights = s at the chosen / (sum + 1e-20) * scale."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.top_k = config.num_experts_per_tok
        self.groups, self.top_groups = config.n_group, config.topk_group
        self.scale = config.routed_scaling_factor
        self.normalise = config.norm_topk_prob

    def forward(
        self, x: Tensor, ops: RowOps, replay: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> (own choice int64 [N, K], used experts [N, K], weights fp32 [N, K]).

        ``replay`` int64 [N, K] replaces the choice, never the weights: those are always the
        current router's scores at the used experts. Choices are sorted by expert id.
        """
        return self.route(self.scores(x, ops), replay)

    def scores(self, x: Tensor, ops: RowOps) -> Tensor:
        """x [N, H] -> fp32 [N, E]."""
        return torch.sigmoid(self.logits(x, ops))

    def logits(self, x: Tensor, ops: RowOps) -> Tensor:
        """x [N, H] -> fp32 [N, E]."""
        return ops.linear(x.float(), self.weight.float())

    @property
    def rule(self) -> RouteRule:
        return RouteRule(self.top_k, self.groups, self.top_groups, self.normalise, self.scale)

    def route(self, scores: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What ``forward`` returns, from scores."""
        biased = scores.detach() + self.e_score_correction_bias
        if self.groups > 1:
            biased = self._best_groups(biased)
        chosen = biased.topk(self.top_k, dim=-1).indices.sort(dim=-1).values
        used = chosen if replay is None else replay
        weights = scores.gather(1, used)
        if self.normalise:
            total = weights[:, :1]
            for k in range(1, self.top_k):  # a fixed order of additions
                total = total + weights[:, k : k + 1]
            weights = weights / (total + 1e-20)
        return chosen, used, weights * self.scale

    def _best_groups(self, biased: Tensor) -> Tensor:
        """-inf outside the groups whose two best experts sum highest (DeepSeek-V3, 2.1.2)."""
        grouped = biased.unflatten(1, (self.groups, -1))
        worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
        lost = torch.ones_like(worth, dtype=torch.bool)
        lost.scatter_(1, worth.topk(self.top_groups, dim=-1).indices, False)
        return grouped.masked_fill(lost[:, :, None], -torch.inf).flatten(1)


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
        out, chosen, _ = self.compute(x, ops, replay)
        return out, chosen

    def compute(
        self, x: Tensor, ops: RowOps, replay: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``forward`` with the router's scores fp32 [N, E], which carry gradient."""
        logits = self.gate.logits(x, ops)
        scores = torch.sigmoid(logits)
        fused = None
        if replay is None:
            fused = ops.route(logits, self.gate.e_score_correction_bias, self.gate.rule)
        if fused is None:
            chosen, used, weights = self.gate.route(scores, replay)
        else:
            chosen, weights = fused
            used = chosen
        out = ops.experts(x, used, weights, self.experts_gate_up_proj, self.experts_down_proj)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x, ops)
        return out, chosen, scores
