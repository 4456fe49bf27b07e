"""Token buckets: how many tokens a class of users may compute a second."""

from __future__ import annotations

import math

from pydantic import Field

from infra.config import ConfigModel


class RateClass(ConfigModel):
    """Of all users of one class together."""

    tokens_per_s: float = Field(default=math.inf, gt=0)
    """Prompt tokens and tokens asked for; those not sampled are given back."""
    burst_tokens: float = Field(default=8192, gt=0)
    """What may be used at once after a pause."""


class TokenBucket:
    """Fills with ``rate`` a second up to ``burst``. One request larger than that is let in when the
    bucket is full and leaves a debt, so a large request waits longer but is never impossible."""

    def __init__(self, rate: RateClass, now: float) -> None:
        self._rate = rate.tokens_per_s
        self._burst = rate.burst_tokens
        self._level = rate.burst_tokens
        self._filled_at = now

    def take(self, tokens: float, now: float) -> float:
        """0 when taken; else seconds until it could be, and nothing is taken."""
        self._fill(now)
        wanted = min(tokens, self._burst)
        # less than a millionth of a token is rounding
        if self._level + 1e-6 >= wanted:
            self._level -= tokens
            return 0.0
        return (wanted - self._level) / self._rate

    def give_back(self, tokens: float, now: float) -> None:
        self._fill(now)
        self._level = min(self._burst, self._level + tokens)

    def _fill(self, now: float) -> None:
        if math.isinf(self._rate):
            self._level = self._burst
        else:
            added = max(0.0, now - self._filled_at) * self._rate
            self._level = min(self._burst, self._level + added)
        self._filled_at = max(now, self._filled_at)
