"""Warm tool call against a process per call: ``python -m sandbox.bench.warm_call``.

Measures, in one run on one machine: a session call in a warm box (decode, box, loop detector), the
same function through ``subprocess.run`` of the same interpreter per call, cold starts, resets and
pool acquisition. Milliseconds are p50 (p95); only the ratio travels between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass

from sandbox.backends.interpreter import find_interpreter
from sandbox.bench.timing import Timing, machine, since
from sandbox.catalog.lookup_calc.family import LookupCalc
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.session import RawCall

ACQUIRE = "acquire from the pool"
_COLD_CODE = "import ast; print(ast.literal_eval('3') + 4)"


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured."""

    level: str
    call: Timing
    process: Timing
    others: list[Timing]

    @property
    def ratio(self) -> float:
        """How many warm calls fit into one process per call."""
        return self.process.p50 / self.call.p50


async def measure(config: SandboxConfig, num_calls: int, num_processes: int) -> Report:
    """Run everything once; at least 20 samples each."""
    family = LookupCalc()
    pool = SandboxPool(family.bundle, size=1, leases=MemoryLeases(), config=config)
    begin = time.perf_counter()
    await pool.start()
    cold = [1e3 * (time.perf_counter() - begin) / 2]  # a box and a verifier box
    calls, acquires, starts, closes, verifies = [], [], [], [], []
    try:
        while len(calls) < num_calls:
            spec = family.instance(0, len(acquires), "train", "lookup")
            at = time.perf_counter()
            session = await pool.acquire(spec)
            acquires.append(since(at))
            at = time.perf_counter()
            await session.start()
            starts.append(since(at))
            for number in range(10):
                expression = f'{{"expression":"{number}+4"}}'
                at = time.perf_counter()
                await session.call(RawCall("functions.calc:0", expression))
                calls.append(since(at))
            at = time.perf_counter()
            await session.verify("7")
            verifies.append(since(at))
            at = time.perf_counter()
            await session.close()
            closes.append(since(at))
    finally:
        await pool.close()
    return Report(
        level=pool.level.value,
        call=Timing("warm call", calls),
        process=Timing("subprocess.run per call", _processes(num_processes)),
        others=[
            Timing("cold start (box)", cold),
            Timing(ACQUIRE, acquires),
            Timing("episode start (fork, setup)", starts),
            Timing("verify (other box, fork)", verifies),
            Timing("close (reset, digest)", closes),
        ],
    )


def _processes(count: int) -> list[float]:
    """The baseline: one interpreter start per call, without any isolation."""
    python = str(find_interpreter().path)
    samples = []
    for _ in range(count):
        at = time.perf_counter()
        subprocess.run([python, "-I", "-S", "-c", _COLD_CODE], capture_output=True, check=True)
        samples.append(since(at))
    return samples


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="auto", choices=["auto", "A", "B", "C", "docker"])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--processes", type=int, default=40)
    options = parser.parse_args()
    config = SandboxConfig(level=options.level, unsafe_local=options.level == "C")
    report = asyncio.run(measure(config, options.calls, options.processes))
    lines = [
        f"level {report.level}, {machine()}",
        report.call.line(),
        report.process.line(),
        f"{'ratio':<28} {report.ratio:8.1f} x",
        *(timing.line() for timing in report.others),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
