"""The bars of facts/sandboxes.md 8 in one run: ``python -m sandbox.bench.bars``.

Warm exec, acquire from a pool, cold bubblewrap start, and many episodes that wait on tools; each
beside its peer in the same run and beside the load of the machine. The times are meant for an idle
machine; what does not depend on the others so much is the ratio to the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox.backends.base import Level
from sandbox.backends.choice import open_backend
from sandbox.bench import many_waits, starts, warm_call
from sandbox.bench.load import Load, measured_load
from sandbox.bench.timing import machine
from sandbox.config import SandboxConfig

NUM_CALLS, NUM_PROCESSES, NUM_BOXES, NUM_EPISODES = 500, 40, 20, 1000


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure; it must stay below ``limit``."""

    name: str
    value: float
    limit: float
    unit: str
    peer: str = ""
    """What the same costs otherwise, measured in the same run."""

    @property
    def ok(self) -> bool:
        return self.value < self.limit

    def line(self) -> str:
        """One line of the report."""
        verdict = "ok" if self.ok else "MISSED"
        peer = f" ({self.peer})" if self.peer else ""
        return f"{self.name:<28} {self.value:8.2f} {self.unit} < {self.limit:g}: {verdict}{peer}"


@dataclass(slots=True)
class Part:
    """Bars that were measured together, and facts beside them."""

    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    lost: int = 0

    @property
    def ok(self) -> bool:
        return all(bar.ok for bar in self.bars) and not self.lost

    def lines(self) -> list[str]:
        """Of the report."""
        return [*(bar.line() for bar in self.bars), *self.notes, f"  {self.load.line()}"]


def measure_warm() -> Part:
    """A call in a warm box, and a box from a pool."""
    part = Part()
    with measured_load() as part.load:
        report = asyncio.run(warm_call.measure(SandboxConfig(), NUM_CALLS, NUM_PROCESSES))
    acquire = next(timing for timing in report.others if timing.name == warm_call.ACQUIRE)
    peer = f"a process per call {report.process.p50:.1f} ms, {report.ratio:.0f} x"
    part.bars = [
        Bar("warm exec p50", report.call.p50, 2.0, "ms", peer),
        Bar("pool acquire p50", acquire.p50, 50.0, "ms"),
    ]
    part.notes = [f"  level {report.level}; p95: {report.call.p95:.2f}, {acquire.p95:.2f} ms"]
    return part


def measure_cold() -> Part:
    """A bubblewrap box with cgroups, from nothing to the answer of its first call."""
    part, backend = Part(), open_backend(Level.A, SandboxConfig())
    with measured_load() as part.load:
        process = starts.measure_process(max(20, NUM_BOXES))
        timings = asyncio.run(starts.measure_level(backend, NUM_BOXES))
        spent_ms = asyncio.run(starts.measure_cpu(backend, NUM_BOXES))
    cold = timings["start to first answer"]
    peer = f"a bare process {process.p50:.1f} ms, {cold.p50 / process.p50:.1f} x"
    part.bars = [Bar("cold bubblewrap start p50", cold.p50, 60.0, "ms", peer)]
    part.notes = [f"  p95 {cold.p95:.1f} ms; processor time from start to end {spent_ms:.1f} ms"]
    return part


def measure_waits(num_episodes: int = NUM_EPISODES) -> Part:
    """Episodes that call a tool of 1 s again and again, each in a box of its own."""
    part = Part()
    config = SandboxConfig(memory_mib=64, disk_mib=4, start_timeout_s=120)
    with measured_load() as part.load:
        report = asyncio.run(many_waits.run(config, num_episodes, num_calls=10, tool_s=1.0))
    waits = report.waits
    peer = f"a process per call costs the driver {report.peer_ratio:.1f} x"
    name = f"driver, {num_episodes} waiting"
    part.bars = [Bar(name, 100 * waits.share, 20.0, "% of a core", peer)]
    part.notes = [
        f"  level {report.level}; {waits.num_calls} calls in {waits.wall_s:.1f} s, "
        f"{waits.num_lost} lost, {report.opened_s:.0f} s to open the boxes; answers later than "
        f"their tools: p50 {waits.late.p50:.0f} ms, p95 {waits.late.p95:.0f} ms"
    ]
    part.lost = waits.num_lost
    return part


PARTS: dict[str, Callable[[], Part]] = {
    "warm": measure_warm,
    "cold": measure_cold,
    "waits": measure_waits,
}


def main() -> None:
    """Print all; exit 1 when a bar is missed or an episode is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    sys.stdout.write(f"{machine()}\n")
    missed = False
    for name in options.parts:
        part = PARTS[name]()
        missed |= not part.ok
        sys.stdout.write("\n".join(part.lines()) + "\n")
        sys.stdout.flush()
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
