"""Many episodes that wait for their tools at once: ``python -m sandbox.bench.many_waits``.

Each episode has a box of its own and calls, one call after the other, a tool that sleeps 1 s. All
of them run in one event loop. Reported: the share of one core that the driver needs while they
wait, lost episodes, and how late answers were; as the peer, the same waits as plain processes
(``asyncio.create_subprocess_exec`` of sleep), which is what a harness without warm boxes does.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from dataclasses import dataclass

from sandbox.backends.base import PooledBox
from sandbox.backends.choice import Backend, choose_backend
from sandbox.backends.program import BoxProgram
from sandbox.bench.timing import Timing, machine
from sandbox.config import SandboxConfig
from sandbox.errors import SandboxLost

PROGRAM = BoxProgram(
    "tools.py",
    "import time\nfrom sandbox.toolkit import tool\n\n@tool\ndef wait(seconds: float) -> str:\n"
    "    time.sleep(seconds)\n    return 'done'\n",
)
_OPEN_AT_ONCE = 8
_GRACE_S = 120.0


@dataclass(frozen=True, slots=True)
class Waits:
    """What one run measured."""

    num_episodes: int
    num_calls: int
    num_lost: int
    wall_s: float
    driver_s: float
    late: Timing

    @property
    def share(self) -> float:
        """Of one core."""
        return self.driver_s / self.wall_s


async def open_boxes(backend: Backend, count: int) -> list[PooledBox]:
    """``count`` boxes with their worlds set up, a few at a time."""
    room = asyncio.Semaphore(_OPEN_AT_ONCE)

    async def one() -> PooledBox:
        async with room:
            box = await backend.open(secrets.token_hex(8), PROGRAM)
            await box.request("start", {"data": {}, "timeout_s": 60}, 90)
            return box

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def measure(boxes: list[PooledBox], num_calls: int, tool_s: float) -> Waits:
    """Let every box wait ``num_calls`` times."""
    late = Timing("answer later than its tool")
    params = {"tool": "wait", "arguments": {"seconds": tool_s}, "max_output_bytes": 100}
    lost = 0

    async def episode(box: PooledBox) -> None:
        nonlocal lost
        try:
            for _ in range(num_calls):
                at = time.perf_counter()
                asked = {**params, "timeout_s": tool_s + _GRACE_S}
                reply = await box.request("call", asked, tool_s + 2 * _GRACE_S)
                late.samples.append(1e3 * (time.perf_counter() - at - tool_s))
                lost += reply.value != "done"
        except SandboxLost:
            lost += 1

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode(box) for box in boxes))
    return Waits(
        num_episodes=len(boxes),
        num_calls=len(late.samples),
        num_lost=lost,
        wall_s=time.perf_counter() - wall,
        driver_s=time.process_time() - cpu,
        late=late,
    )


async def measure_peer(count: int, num_calls: int, tool_s: float) -> tuple[float, float]:
    """(driver's CPU s, wall s) of the same waits as a process each."""

    async def episode() -> None:
        for _ in range(num_calls):
            process = await asyncio.create_subprocess_exec("sleep", str(tool_s))
            await process.wait()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode() for _ in range(count)))
    return time.process_time() - cpu, time.perf_counter() - wall


@dataclass(frozen=True, slots=True)
class Report:
    """The whole bench."""

    level: str
    waits: Waits
    opened_s: float
    """To open all boxes."""
    tool_s: float
    peer_us: float
    """Of the driver, for a call that is a process."""

    @property
    def own_us(self) -> float:
        """Of the driver, for a call."""
        return 1e6 * self.waits.driver_s / self.waits.num_calls

    @property
    def peer_ratio(self) -> float:
        return self.peer_us / self.own_us

    def lines(self) -> list[str]:
        """As text."""
        waits = self.waits
        return [
            f"level {self.level}, {machine()}",
            f"{waits.num_episodes} boxes opened in {self.opened_s:.1f} s "
            f"({waits.num_episodes / self.opened_s:.0f} /s)",
            f"{waits.num_episodes} episodes x {waits.num_calls // waits.num_episodes} calls of "
            f"{self.tool_s:g} s in {waits.wall_s:.1f} s, {waits.num_lost} lost",
            f"driver: {100 * waits.share:.1f} % of a core, {self.own_us:.0f} us a call",
            waits.late.line(),
            f"peer: a process per call costs the driver {self.peer_us:.0f} us, "
            f"{self.peer_ratio:.1f} x ours",
        ]


async def run(config: SandboxConfig, count: int, num_calls: int, tool_s: float) -> Report:
    """Open the boxes, wait, close them, then the peer."""
    backend = choose_backend(config)
    begin = time.perf_counter()
    boxes = await open_boxes(backend, count)
    opened_s = time.perf_counter() - begin
    try:
        waits = await measure(boxes, num_calls, tool_s)
    finally:
        await asyncio.gather(*(box.kill() for box in boxes))
    peer_count = min(count, 200)
    peer_cpu, _ = await measure_peer(peer_count, num_calls, tool_s)
    peer_us = 1e6 * peer_cpu / (peer_count * num_calls)
    return Report(backend.level.value, waits, opened_s, tool_s, peer_us)


def main() -> None:
    """Print the report; exit 1 when an episode was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="auto", choices=["auto", "A", "B", "C", "docker"])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tool-s", type=float, default=1.0)
    options = parser.parse_args()
    config = SandboxConfig(
        level=options.level, unsafe_local=options.level == "C", memory_mib=64, disk_mib=4
    )
    report = asyncio.run(run(config, options.episodes, options.calls, options.tool_s))
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if report.waits.num_lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
