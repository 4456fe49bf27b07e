"""How busy the machine was while something was measured, and how much of it we were."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Load:
    """Means over the measurement. CPUs: 1.0 = one core all the time."""

    before: float = 0.0
    """Load average of a minute when it began."""
    after: float = 0.0
    busy_cpus: float = 0.0
    own_cpus: float = 0.0
    """Of this process and the children that it has waited for."""
    wall_s: float = 0.0

    def line(self) -> str:
        """One line of a report."""
        return (
            f"load {self.before:.1f} -> {self.after:.1f}, {self.busy_cpus:.2f} of "
            f"{os.cpu_count()} CPUs busy, {self.own_cpus:.2f} by this bench, {self.wall_s:.0f} s"
        )


@contextmanager
def measured_load() -> Iterator[Load]:
    """The values are there after the block."""
    load = Load(before=os.getloadavg()[0])
    begin, busy, own = time.perf_counter(), _busy_s(), _own_s()
    yield load
    load.wall_s = time.perf_counter() - begin
    load.busy_cpus = (_busy_s() - busy) / load.wall_s
    load.own_cpus = (_own_s() - own) / load.wall_s
    load.after = os.getloadavg()[0]


def _busy_s() -> float:
    """Seconds that all processors together were not idle since boot (proc(5), /proc/stat)."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
