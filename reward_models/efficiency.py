"""Stage 1: shorter correct answers are worth a little more, down to a floor (facts 3.3, 3.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reward_models.config import EfficiencyConfig


def quantile(values: Sequence[float], q: float) -> float:
    """Lower nearest-rank quantile of a non-empty sequence; exact, no interpolation."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def minimum_tokens(
    author: float | None, correct: Sequence[int], config: EfficiencyConfig
) -> float | None:
    """m = max(author, q10 of verified correct lengths); q10 needs ``min_correct`` of them.

    Not the running minimum: one lucky short guess would ratchet the floor down.
    """
    if len(correct) < config.min_correct:
        return author
    measured = quantile(correct, 0.10)
    return measured if author is None else max(author, measured)


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
