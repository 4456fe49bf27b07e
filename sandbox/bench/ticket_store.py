"""Tool latency on 100,000 dialogues: ``python -m sandbox.bench.ticket_store``.

One real box per language: the store is built by ``setup``, then every tool is called with wide and
narrow questions. Milliseconds as the session sees them; exit status 1 when a call misses the
target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field

from sandbox.catalog.ticket_root_cause.family import NUM_TICKETS, TicketRootCause
from sandbox.catalog.ticket_root_cause.words import SEARCH, WORDS
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool, config_for
from sandbox.session import RawCall
from sandbox.task import TaskSpec

TARGET_MS = 3000.0


@dataclass(slots=True)
class Report:
    """Milliseconds by tool; ``setup_s`` of each language."""

    level: str
    setup_s: dict[str, float] = field(default_factory=dict)
    calls_ms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def slowest_ms(self) -> float:
        return max(max(samples) for samples in self.calls_ms.values())

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"level {self.level}, {NUM_TICKETS:,} dialogues"]
        lines += [f"setup {language}: {value:.1f} s" for language, value in self.setup_s.items()]
        for name, samples in sorted(self.calls_ms.items()):
            p95 = sorted(samples)[int(0.95 * (len(samples) - 1))]
            lines.append(
                f"{name:<22} p50 {statistics.median(samples):7.1f} ms  p95 {p95:7.1f} ms  "
                f"max {max(samples):7.1f} ms  n={len(samples)}"
            )
        verdict = "met" if self.slowest_ms < TARGET_MS else "MISSED"
        lines.append(f"target: every call < {TARGET_MS:.0f} ms: {verdict}")
        return lines


async def measure(config: SandboxConfig, repeats: int) -> Report:
    """Every question ``repeats`` times in each language."""
    family = TicketRootCause()
    specs = [family.instance(0, 0, "train", language) for language in family.task_types]
    config = config_for(specs[0], config)
    pool = SandboxPool(family.bundle, size=1, leases=MemoryLeases(), config=config)
    await pool.start()
    report = Report(pool.level.value)
    try:
        for spec in specs:
            session = await pool.acquire(spec)
            started = await session.start()
            assert started.error is None, started.text
            report.setup_s[spec.task_type] = started.elapsed_s
            for number in range(repeats):
                for tool, arguments in _questions(spec, number):
                    call = RawCall(f"functions.{tool}:0", json.dumps(arguments))
                    seen = await session.call(call)
                    assert seen.error is None, seen.text
                    name = f"{spec.task_type} {tool}"
                    report.calls_ms.setdefault(name, []).append(1e3 * seen.elapsed_s)
            await session.close()
    finally:
        await pool.close()
    return report


def _questions(spec: TaskSpec, number: int) -> list[tuple[str, dict[str, object]]]:
    """From one word that is in every dialogue to a narrow phrase."""
    words = WORDS[spec.task_type]
    incident = spec.environment.data["incident"]
    narrow = {"product": incident["product"], "since": incident["since"]}
    everywhere, finding = words["agent"], SEARCH[spec.task_type]
    return [
        ("search", {"query": everywhere}),
        ("search", {"query": f"{everywhere} {finding}"}),
        ("search", {"query": finding, **narrow}),
        ("count_by", {"field": "version"}),
        ("count_by", {"field": "day", "query": everywhere}),
        ("count_by", {"field": "region", "query": finding, **narrow}),
        ("read_ticket", {"ticket_id": 1 + 997 * number % NUM_TICKETS}),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the report; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    report = asyncio.run(measure(SandboxConfig(), options.repeats))
    load = os.getloadavg()[0]
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}\n")
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 0 if report.slowest_ms < TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
