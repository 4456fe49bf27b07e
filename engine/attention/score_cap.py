"""A hard cap on attention scores before the softmax (the seed's QK-Clip, facts/kimi-facts.md 2.2).

Only a learner's forward has it. No engine here or elsewhere caps scores, so a policy that needs the
cap is not the one an engine serves: ``clamped`` must be 0 for what is published.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 2.0**-16
"""Weights that QK-Clip brought down to the limit score so near to it; that is not over it."""


@dataclass(slots=True)
class ScoreCap:
    """``limit`` of scores as the softmax reads them; large negative ones are harmless."""

    limit: float
    clamped: int = 0
    """Scores held back ..."""
    scores: int = 0
    """... of so many that were read, since the last ``reset``."""

    def clamp(self, logits: Tensor, seen: Tensor) -> Tensor:
        """min(logits, limit) where ``seen`` (bool, broadcast), with gradient 0 where it holds;
        ``logits`` itself, to the bit, where nothing is over the limit."""
        over = (logits.detach() > self.limit * (1 + ROUNDING)) & seen
        self.scores += int(seen.expand(logits.shape).sum())
        clamped = int(over.sum())
        self.clamped += clamped
        return torch.where(over, self.limit, logits) if clamped else logits

    def reset(self) -> None:
        self.clamped = self.scores = 0
