"""QK-Clip: attention scores that grew too large are held back, in the weights or in the forward.

weights (Kimi K2 report, section 2.1; facts/kimi-facts.md 2.1): S = max over the batch and i >= j of
q_i . k_j / sqrt(D) for each head; after a step, where S > tau, the head's scores are scaled by
gamma = tau / S for good. The forward and backward of the step are not altered. Where heads own
both, W_q takes gamma^alpha and W_k gamma^(1 - alpha); under gqa a group of query heads shares its
key head, so all of it goes to W_q.

logits (the seed; facts/kimi-facts.md 2.2): scores over tau are clamped before the softmax of the
learner's forward, with gradient 0. K2 rejects this alone: the products behind it still grow, and
no engine clamps. With ``both`` the weights keep the clamp idle once they have come down.
``logit_clamp_fraction`` says how idle: weights of a step where it is above 0 are not those that an
engine serves. TokenLearner.weights warns then; a publisher that must refuse them (export to vLLM)
reads the figure in the step's metrics, before parl.weights writes the set.

Large scores are also what lifts fp32 rounding: at S = 75 engine and learner were seen to differ by
2.6e-4 in the logprob of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.score_cap import ScoreCap
from engine.model.attention import Attention, LatentAttention
from engine.model.model import Layer, PolicyModel
from parl.learner.config import QKClipMode


class QKClip:
    """Watches the forward passes of one step, then clips. Shapes: B sequences, T longest length, A
    query heads, G key heads, D head size, L layers."""

    def __init__(
        self, model: PolicyModel, tau: float, mode: QKClipMode = "weights", alpha: float = 0.5
    ) -> None:
        self._layers = [_attention(layer) for layer in model.layers]
        self._tau = tau
        self._alpha = alpha
        self._scales = mode in ("weights", "both")
        self.cap = ScoreCap(tau) if mode in ("logits", "both") else None
        """For the forward passes; None where the mode has no clamp."""
        self.max_scores = torch.zeros(len(self._layers), self._layers[0].heads)
        """fp32 [L, A] since the last ``step``, before any clamp."""

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
        """Clip by ``max_scores`` fp32 [L, A] (the maximum over all ranks) where the mode says so,
        forget what was watched; returns the highest score before the clip."""
        if self._scales:
            factors = self._tau / max_scores.clamp(min=self._tau)
            for attention, factor in zip(self._layers, factors, strict=True):
                attention.scale_scores(factor, self._alpha)
        self.max_scores.zero_()
        return float(max_scores.max())

    def take_counts(self) -> Tensor | None:
        """float64 [2]: scores clamped and scores read since the last call; None without a clamp."""
        if self.cap is None:
            return None
        counts = torch.tensor([self.cap.clamped, self.cap.scores], dtype=torch.float64)
        self.cap.reset()
        return counts


def _attention(layer: object) -> Attention | LatentAttention:
    assert isinstance(layer, Layer), f"QK-Clip knows the layers of PolicyModel, not {type(layer)}"
    return layer.self_attn
