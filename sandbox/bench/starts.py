"""Cold starts and container cycles: ``python -m sandbox.bench.starts``.

For every level that works here, in one run: a box from nothing to its first answer, a warm call, a
reset, the end; and as peers the same interpreter as a plain process, and for docker a container
cycle and a ``docker exec`` the usual way (the SDK, bridge network, no limits). Milliseconds are p50
(p95); only ratios travel between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import secrets
import subprocess
import sys
import time
from typing import Any

from sandbox.backends.base import Level
from sandbox.backends.choice import Backend, open_backend
from sandbox.backends.interpreter import find_interpreter
from sandbox.backends.program import BoxProgram
from sandbox.bench.timing import Timing, machine, since
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable

PROGRAM = BoxProgram(
    "tools.py", "from sandbox.toolkit import tool\n\n@tool\ndef one() -> str:\n    return '1'\n"
)
_CALL = {"tool": "one", "arguments": {}, "max_output_bytes": 100, "timeout_s": 5}
_CALLS_A_BOX = 50
_PEER_COMMAND = ["-I", "-S", "-c", "print(1)"]


async def measure_level(backend: Backend, num_boxes: int) -> dict[str, Timing]:
    """start (to the first answer), call, reset and end of boxes opened one after the other."""
    names = ("start to first answer", "warm call", "reset", "end")
    timings = {name: Timing(f"{backend.level}: {name}") for name in names}
    for _ in range(num_boxes):
        at = time.perf_counter()
        box = await backend.open(secrets.token_hex(8), PROGRAM)
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        await box.request("call", _CALL, 10)
        timings["start to first answer"].samples.append(since(at))
        for _ in range(_CALLS_A_BOX):
            at = time.perf_counter()
            reply = await box.request("call", _CALL, 10)
            timings["warm call"].samples.append(since(at))
            assert reply.value == "1", reply
        at = time.perf_counter()
        assert await box.reset(), "the bench's own program leaves nothing"
        timings["reset"].samples.append(since(at))
        at = time.perf_counter()
        await box.kill()
        timings["end"].samples.append(since(at))
    return timings


async def measure_cpu(backend: Backend, num_boxes: int) -> float:
    """Milliseconds of processor time (ours and the box's) of one start and end; unlike the wall
    time it hardly depends on what else the machine does."""

    def spent() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return 1e3 * sum(usage.ru_utime + usage.ru_stime for usage in used)

    before = spent()
    for _ in range(num_boxes):
        box = await backend.open(secrets.token_hex(8), PROGRAM)
        await box.kill()
    return (spent() - before) / num_boxes


def measure_process(count: int) -> Timing:
    """The peer of every level: one interpreter per call, no isolation."""
    timing = Timing("peer: subprocess.run per call")
    command = [str(find_interpreter().path), *_PEER_COMMAND]
    for _ in range(count):
        at = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        timing.samples.append(since(at))
    return timing


def measure_docker_peer(count: int) -> tuple[Timing, Timing]:
    """A container cycle (create, start, exec, remove) and an exec, as most harnesses do them."""
    from sandbox.backends.docker_engine import connected
    from sandbox.backends.docker_image import ensure_image

    cycle = Timing("peer: docker create+start+exec+remove")
    run = Timing("peer: docker exec python")
    with connected() as client:
        image = ensure_image(client)
        for _ in range(count):
            at = time.perf_counter()
            container: Any = client.containers.create(image, ["sleep", "60"], init=True)
            try:
                container.start()
                container.exec_run(["python3", *_PEER_COMMAND])
                inner = time.perf_counter()
                container.exec_run(["python3", *_PEER_COMMAND])
                run.samples.append(since(inner))
                spent = run.samples[-1]
            finally:
                container.remove(force=True)
            cycle.samples.append(since(at) - spent)
    return cycle, run


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", nargs="+", default=["A", "B", "docker"])
    parser.add_argument("--boxes", type=int, default=20)
    options = parser.parse_args()
    lines = [machine()]
    process = measure_process(max(20, options.boxes))
    lines.append(process.line())
    for name in options.levels:
        level = Level(name)
        config = SandboxConfig(unsafe_local=level is Level.C)
        try:
            backend = open_backend(level, config)
        except BackendUnavailable as error:
            lines.append(f"{name}: skipped: {error}")
            continue
        timings = asyncio.run(measure_level(backend, options.boxes))
        lines += [timing.line() for timing in timings.values()]
        if level is not Level.DOCKER:  # a container's processes are not ours to count
            spent = asyncio.run(measure_cpu(backend, options.boxes))
            lines.append(f"  processor time of a cold box, start to end: {spent:.1f} ms")
        call, cold = timings["warm call"].p50, timings["start to first answer"].p50
        lines.append(f"  a process per call costs {process.p50 / call:.0f} x a warm call")
        lines.append(f"  a cold box costs {cold / process.p50:.1f} x a bare process")
        if level is Level.DOCKER:
            cycle, run = measure_docker_peer(options.boxes)
            ours = cold + timings["end"].p50
            lines += [cycle.line(), run.line()]
            lines.append(f"  docker exec costs {run.p50 / call:.0f} x a warm call")
            lines.append(f"  our hardened cycle costs {ours / cycle.p50:.2f} x the usual one")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
