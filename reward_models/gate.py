"""Accuracy gate with hysteresis: is a task type learnt well enough to ask for brevity?

Opens when p - sqrt(p (1 - p) / n) > open_above, closes when p < close_below, over the last W scored
episodes and only with n >= min_samples. p counts correctness before any budget effect; measuring it
on punished outputs makes the gate fight itself (facts 3.2). A pure fold over rows in ledger order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from reward_models.config import GateConfig


@dataclass(frozen=True, slots=True)
class GateState:
    """``recent``: correctness of the last W scored episodes, oldest first."""

    open: bool = False
    recent: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float:
        """Mean of ``recent``; 0 when empty."""
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    @property
    def standard_error(self) -> float:
        p = self.accuracy
        return math.sqrt(p * (1 - p) / len(self.recent)) if self.recent else 0.0


def update(state: GateState, correctness: Iterable[float], config: GateConfig) -> GateState:
    """Add one update's scored episodes, then decide once."""
    recent = (*state.recent, *correctness)[-config.window :]
    state = replace(state, recent=recent)
    if len(recent) < config.min_samples:
        return state
    if state.open:
        return replace(state, open=state.accuracy >= config.close_below)
    return replace(state, open=state.accuracy - state.standard_error > config.open_above)
