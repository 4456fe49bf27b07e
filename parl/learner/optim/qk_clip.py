"""QK-Clip: after a step, heads whose attention scores grew too large get smaller query weights.

Kimi K2 report, section 2.1 (facts/kimi-facts.md 2): S = max over the batch and i >= j of
q_i . k_j / sqrt(D) for each head; where S > tau, W_q <- (tau / S) W_q. The forward and backward of
the step are not altered. K2 splits the factor between W_q and W_k (alpha = 1/2) because its heads
own both; under gqa a group of query heads shares its key head, so all of it goes to W_q.

Large scores are also what lifts fp32 rounding: at S = 75 engine and learner were seen to differ by
2.6e-4 in the logprob of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.attention import Attention, LatentAttention
from engine.model.model import Layer, PolicyModel


class QKClip:
    """Watches the forward passes of one step, then clips. Shapes: B sequences, T longest length, A
    query heads, G key heads, D head size, L layers."""

    def __init__(self, model: PolicyModel, tau: float) -> None:
        self._layers = [_attention(layer) for layer in model.layers]
        self._tau = tau
        self.max_scores = torch.zeros(len(self._layers), self._layers[0].heads)
        """fp32 [L, A] since the last ``step``."""

    @torch.no_grad()
    def watch(self, layer: int, q: Tensor, k: Tensor) -> None:
        """q [B, A, T, D], k [B, G, T, D], zero where padded: such scores are 0 and clip nothing."""
        batch, heads, length, head_dim = q.shape
        groups = k.shape[1]
        # query heads of a group stand together, so one product serves them all
        stacked = q.reshape(batch, groups, heads // groups * length, head_dim)
        scores = (stacked @ k.transpose(-1, -2)).view(batch, heads, length, length)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        highest = scores.masked_fill_(future, 0.0).amax(dim=(0, 2, 3)) * head_dim**-0.5
        self.max_scores[layer] = torch.maximum(self.max_scores[layer], highest.float())

    @torch.no_grad()
    def step(self, max_scores: Tensor) -> float:
        """Clip by ``max_scores`` fp32 [L, A] (the maximum over all ranks), forget what was watched;
        returns the highest score before the clip."""
        factors = self._tau / max_scores.clamp(min=self._tau)
        for attention, factor in zip(self._layers, factors, strict=True):
            attention.scale_scores(factor)
        self.max_scores.zero_()
        return float(max_scores.max())


def _attention(layer: object) -> Attention | LatentAttention:
    assert isinstance(layer, Layer), f"QK-Clip knows the layers of PolicyModel, not {type(layer)}"
    return layer.self_attn
