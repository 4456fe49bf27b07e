"""When and whom to kill, drawn from a seed; and how to find the victim by what the run recorded."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from parl.cli.waits import WorkerWaits, process_alive, read_waits

T = TypeVar("T")

TARGETS = ("runner", "engine", "driver")
TOOL_CALL = "sandbox.call"
POLL_S = 0.02
WAIT_FILE_S = 2.5
"""Workers write their waits every second."""


@dataclass(frozen=True, slots=True)
class KillPoint:
    """``delay`` in [0, 1) of a round's duration after round ``round_index`` began."""

    target: str
    in_tool_call: bool
    round_index: int
    delay: float


def draw_points(count: int, num_rounds: int, seed: int) -> list[KillPoint]:
    """Targets in turn; every third runner kill, and at least one, happens inside a tool call."""
    draw = random.Random(seed)
    points = []
    for number in range(count):
        target = TARGETS[number % len(TARGETS)]
        in_call = target == "runner" and (number // len(TARGETS)) % 2 == 0
        points.append(KillPoint(target, in_call, draw.randrange(num_rounds), draw.random()))
    return points


def wait_for(ask: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """Poll ``ask`` until it answers; TimeoutError names ``what``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(POLL_S)
    raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Stop processes, so that whoever asks them something keeps waiting; wake them up after."""
    # one that ended meanwhile needs neither; boxes die with the runner that is killed in between
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def worker_in_call(run_dir: Path, newer_than: float) -> WorkerWaits | None:
    """A live rollout worker that has a tool call open, by a wait file written after ``newer_than``
    (epoch s); None when every live worker has written one and none is in a call, or after
    WAIT_FILE_S."""
    deadline = time.time() + WAIT_FILE_S
    while time.time() < deadline:
        workers = [w for w in read_waits(run_dir) if process_alive(w.pid)]
        fresh = [w for w in workers if time.time() - w.written_s_ago > newer_than]
        for worker in fresh:
            if any(wait.what == TOOL_CALL for wait in worker.waits):
                return worker
        if workers and len(fresh) == len(workers):
            return None
        time.sleep(POLL_S)
    return None
