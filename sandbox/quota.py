"""Token buckets and spend caps. ``LocalQuotas`` keeps them in one process; the same class behind an
actor shares them across the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_SWEEP_AT = 4096


class QuotaStore(Protocol):
    """Keeper of named buckets and budgets. Calls may raise: then nothing was taken and the caller
    refuses (fails closed)."""

    async def take(self, key: str, rate_per_s: float, burst: float, max_wait_s: float) -> float:
        """Take one token of bucket ``key``: seconds to wait before using it, or -1 when that would
        be over ``max_wait_s`` (then nothing is taken)."""
        ...

    async def spend(self, key: str, amount: float, cap: float) -> bool:
        """Add ``amount`` to what ``key`` has spent; False, and nothing added, when over ``cap``."""
        ...


@dataclass(slots=True)
class _Bucket:
    """``tokens`` may be negative: tokens handed out before they exist, to those who wait."""

    tokens: float
    at_s: float


class LocalQuotas:
    """Implements QuotaStore in memory. Each method runs without an await inside, so concurrent
    callers of one event loop cannot overdraw."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._spent: dict[str, float] = {}

    async def take(self, key: str, rate_per_s: float, burst: float, max_wait_s: float) -> float:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            self._sweep(now)
            bucket = self._buckets[key] = _Bucket(burst, now)
        tokens = min(burst, bucket.tokens + (now - bucket.at_s) * rate_per_s)
        wait_s = max(0.0, (1.0 - tokens) / rate_per_s)
        if wait_s > max_wait_s:
            return -1.0
        bucket.tokens, bucket.at_s = tokens - 1.0, now
        return wait_s

    async def spend(self, key: str, amount: float, cap: float) -> bool:
        spent = self._spent.get(key, 0.0)
        if spent + amount > cap:
            return False
        self._spent[key] = spent + amount
        return True

    def forget(self, prefix: str) -> None:
        """Drop the buckets and budgets of an episode that is over."""
        for table in (self._buckets, self._spent):
            for key in [key for key in table if key.startswith(prefix)]:
                del table[key]

    def _sweep(self, now: float) -> None:
        """A bucket unused for an hour is full again; forget it."""
        if len(self._buckets) >= _SWEEP_AT:
            old = [key for key, bucket in self._buckets.items() if now - bucket.at_s > 3600]
            for key in old:
                del self._buckets[key]
