"""Draws: random integers that are the same on every machine and Python version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
HELDOUT_BUCKETS = 5
"""One bucket of five is held out."""


class Draws:
    """Uniform integers from sha256(key, counter)."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._counter = 0

    def below(self, n: int) -> int:
        """Uniform in [0, n), n <= 2**31; rejection keeps it unbiased."""
        limit = (1 << 32) - (1 << 32) % n
        while True:
            block = hashlib.sha256(f"{self._key}|{self._counter}".encode()).digest()
            self._counter += 1
            value = int.from_bytes(block[:4], "big")
            if value < limit:
                return value % n

    def between(self, low: int, high: int) -> int:
        """Uniform in [low, high], both included."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        """One of ``items``."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different items in random order (Fisher-Yates)."""
        pool = list(items)
        for index in range(count):
            other = index + self.below(len(pool) - index)
            pool[index], pool[other] = pool[other], pool[index]
        return pool[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All items in random order."""
        return self.sample(items, len(items))


def is_heldout_text(identity: str) -> bool:
    """Whether the content ``identity`` describes is reserved for evaluation."""
    return hashlib.sha256(identity.encode()).digest()[0] % HELDOUT_BUCKETS == 0
