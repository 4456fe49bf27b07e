"""The processes that ``kill_leaks`` kills: a driver and its worker, each with a pool of boxes.

A worker ends when its driver does (the pipe to it closes), at once and without a goodbye, as an
actor of a dead cluster does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

from infra.db.engine import open_ledger
from infra.leases import LeaseBook
from sandbox.catalog.lookup_calc.family import LookupCalc
from sandbox.config import SandboxConfig
from sandbox.pool import SandboxPool
from sandbox.session import RawCall
from sandbox.task import ToolBundle
from sandbox.tool_schema import tools_from_source

POOL_SIZE = 2
TOOLS = '''
import os, subprocess, time
from sandbox.toolkit import tool, workdir

@tool(effect="write")
def misbehave(seconds: float) -> str:
    """Leave a daemon and a file, then wait.

    Args:
        seconds: how long to wait
    """
    subprocess.Popen(["setsid", "sleep", "600"])
    (workdir() / f"{time.monotonic()}").write_text("left")
    time.sleep(seconds)
    return "done"
'''


class Handle:
    """A process of this machine that is not our child."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL; it cannot hit another process with the same number."""
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)


async def play(level: str, url: str, seed: int) -> None:
    """Episodes for ever, until somebody kills this process."""
    # mapped columns do not read as plain properties to a type checker
    book: Any = LeaseBook(open_ledger(url))
    bundle = ToolBundle("kill-leaks", TOOLS, "def verify(final_text, end_state, data): return {}")
    config = SandboxConfig().model_copy(update={"level": level})
    pool = SandboxPool(bundle, size=POOL_SIZE, leases=book, config=config)
    tools = tools_from_source(TOOLS)
    base = replace(
        LookupCalc().instance(0, 0, "train", "lookup"),
        bundle=bundle.hash,
        tools=tools,
        forbidden_tools=(),
    )
    draw = random.Random(seed)

    async def episodes() -> None:
        while True:
            session = await pool.acquire(base, owner=f"episode-{draw.random()}")
            await session.start()
            for _ in range(draw.randrange(1, 4)):
                seconds = draw.uniform(0.0, 0.5)
                await session.call(RawCall("misbehave", json.dumps({"seconds": seconds})))
            if draw.random() < 0.3:
                await session._box.kill()  # a new box is opened for the next one
            await session.close()

    await asyncio.gather(*(episodes() for _ in range(POOL_SIZE)))


def end_with_driver() -> None:
    """Die when standard input closes."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """``driver LEVEL URL`` prints the worker's pid and plays; ``worker`` plays."""
    role, level, url = sys.argv[1:4]
    if role == "driver":
        command = [sys.executable, "-m", __spec__.name, "worker", level, url]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE)
        sys.stdout.write(json.dumps({"worker": worker.pid}) + "\n")
        sys.stdout.flush()
    else:
        end_with_driver()
    asyncio.run(play(level, url, os.getpid()))


if __name__ == "__main__":
    main()
