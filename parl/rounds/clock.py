"""How long each step of a round took."""

from __future__ import annotations

import time


class Clock:
    """Wall seconds by step, ``total`` included; starts when it is made."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap was ``name``."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self.laps["total"] = now - self._start
        self._last = now
