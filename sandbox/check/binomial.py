"""Exact binomial bounds (Clopper and Pearson 1934), without a statistics library."""

from __future__ import annotations

import math


def upper_bound(failures: int, trials: int, confidence: float = 0.95) -> float:
    """Largest failure rate that ``failures`` of ``trials`` does not rule out, one-sided.

    The p with P(X <= failures) = 1 - confidence for X ~ Binomial(trials, p). ValueError when
    ``failures`` is not in [0, trials] or ``confidence`` not in (0, 1).
    """
    if not 0 <= failures <= trials or not 0 < confidence < 1:
        raise ValueError(
            f"{failures} failures of {trials} at confidence {confidence}: expected "
            "0 <= failures <= trials and a confidence between 0 and 1"
        )
    if failures == trials:
        return 1.0
    low, high = failures / trials, 1.0
    for _ in range(60):  # halves an interval of 1 below the spacing of floats
        middle = (low + high) / 2
        if cumulative(failures, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def cumulative(k: int, n: int, p: float) -> float:
    """P(X <= k) for X ~ Binomial(n, p), 0 < p < 1."""
    log_p, log_q = math.log(p), math.log1p(-p) if p < 1 else -math.inf
    terms = (
        math.exp(
            math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
            + i * log_p + (n - i) * log_q
        )
        for i in range(k + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(terms)) if p < 1 else float(k >= n)
