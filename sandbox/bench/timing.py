"""Samples of one operation, and the machine they were taken on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one operation."""

    name: str
    samples: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        return statistics.median(self.samples)

    @property
    def p95(self) -> float:
        return sorted(self.samples)[int(0.95 * (len(self.samples) - 1))]

    def line(self) -> str:
        """One line of the report."""
        return f"{self.name:<36} {self.p50:8.2f} ms ({self.p95:.2f})  n={len(self.samples)}"


def since(begin: float) -> float:
    """Milliseconds since a ``time.perf_counter``."""
    return 1e3 * (time.perf_counter() - begin)


def machine() -> str:
    """What a figure must stand beside."""
    return (
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {platform.machine()}, "
        f"Linux {platform.release()}"
    )
