"""Stage 1: shorter correct answers are worth a little more, down to a floor (facts 3.3, 3.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reward_models.config import EfficiencyConfig


def quantile(values: Sequence[float], q: float) -> float:
    """Lower nearest-rank quantile of a non-empty sequence; exact, no interpolation."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def refreshed_minimum(
    rates: Sequence[float], before: float | None, config: EfficiencyConfig
) -> float | None:
    """q10 of T/u over verified correct episodes, u being the task's size; ``before`` with fewer
    than ``min_correct`` of them, and never more than ``max_refresh_drop`` below it.

    Not the running minimum: one lucky short guess would ratchet the floor down.
    """
    if len(rates) < config.min_correct:
        return before
    fresh = quantile(rates, 0.10)
    return fresh if before is None else max(fresh, before * (1 - config.max_refresh_drop))


def minimum_tokens(author: float | None, rate: float | None, size: float) -> float | None:
    """m(x) = max(author's estimate, rate * u(x)) of one task; None when neither is known."""
    known = [m for m in (author, None if rate is None else rate * size) if m is not None]
    return max(known) if known else None


def efficiency(tokens: int, minimum: float, reference: float, config: EfficiencyConfig) -> float:
    """E in [0, 1]: 0 at the reference length, 1 at the floor F = floor_factor * m.

    Below F by ``floor_mode``: none and penalty give 0 (the penalty is the caller's), tent falls
    linearly from 1 at F to 0 at m.
    """
    floor = config.floor_factor * minimum
    if tokens < floor:
        if config.floor_mode == "tent" and floor > minimum:
            return min(max((tokens - minimum) / (floor - minimum), 0.0), 1.0)
        return 0.0
    if reference <= floor:
        return 0.0
    return min(max((reference - tokens) / (reference - floor), 0.0), 1.0)
