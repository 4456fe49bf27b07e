"""The processes that ``kill_leaks`` kills beside the proxy: a driver and its worker, each with a
pool of boxes.

A worker ends when its driver does (the pipe to it closes), at once and without a goodbye, as an
actor of a dead cluster does. How each episode ended is one line of JSON in ``episodes-ROLE.jsonl``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.db.engine import open_ledger
from infra.leases import LeaseBook
from infra.owners import process_owner
from sandbox.bench.kill_task import write_task
from sandbox.config import SandboxConfig
from sandbox.errors import SandboxError
from sandbox.pool import SandboxPool
from sandbox.session import RawCall
from sandbox.task import TaskSpec, load_task
from sandbox.tool_session import ToolSession

POOL_SIZE = 2
_PAUSE_S = 0.1


def temporary(folder: Path, role: str) -> Path:
    """``TMPDIR`` of a victim and all that it starts."""
    return folder / f"tmp-{role}"


def control_socket(folder: Path) -> Path:
    return folder / "proxy" / "control.sock"


def ledger_url(folder: Path) -> str:
    return f"sqlite:///{folder}/ledger.db"


def episodes_file(folder: Path, role: str) -> Path:
    return folder / f"episodes-{role}.jsonl"


class Player:
    """Plays episodes for ever, until somebody kills this process."""

    def __init__(self, level: str, folder: Path, role: str) -> None:
        loaded = load_task(write_task(folder / f"task-{role}", role))
        self._spec: TaskSpec = loaded.spec
        # mapped columns do not read as plain properties to a type checker
        book: Any = LeaseBook(open_ledger(ledger_url(folder)))
        config = SandboxConfig.model_validate(
            {
                "level": level,
                "proxy_socket": control_socket(folder),
                "allow_live": True,
                "start_timeout_s": 60,  # kills are counted on busy machines too
            }
        )
        self._pool = SandboxPool(loaded.bundle, size=POOL_SIZE, leases=book, config=config)
        self._role = role
        self._draw = random.Random(os.getpid())
        self._results = episodes_file(folder, role).open("a", buffering=1, encoding="utf-8")

    async def play(self) -> None:
        """``POOL_SIZE`` episodes at once."""
        await asyncio.gather(*(self._episodes() for _ in range(POOL_SIZE)))

    async def _episodes(self) -> None:
        while True:
            correctness, end = await self._episode()
            line = {"time": time.time(), "correctness": correctness, "end": end}
            self._results.write(json.dumps(line) + "\n")
            if correctness is None:
                await asyncio.sleep(_PAUSE_S)

    async def _episode(self) -> tuple[float | None, str]:
        """(correctness, how it ended); an agent whose tools fail gives up, as the rollout does."""
        try:
            owner = f"{self._role}-{self._draw.random()}@0"
            session = await self._pool.acquire(self._spec, owner=owner)
        except SandboxError as error:
            return None, f"{type(error).__name__}: {error}"
        try:
            return await self._use(session)
        except SandboxError as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            try:
                await session.close()
            except SandboxError:
                await asyncio.sleep(0)  # the proxy is gone, the box was given back all the same

    async def _use(self, session: ToolSession) -> tuple[float | None, str]:
        await session.start()
        for call in self._calls():
            seen = await session.call(call)
            if seen.error is not None:
                return None, f"{call.name_text}: {seen.text}"
        if self._draw.random() < 0.3:
            await session._box.kill()  # a new box is opened for the next one
        verdict = await session.verify("done")
        return verdict.correctness, verdict.error or "verified"

    def _calls(self) -> Iterator[RawCall]:
        for _ in range(self._draw.randrange(1, 3)):
            number = self._draw.randrange(10**6)
            for name, arguments in self._draw.sample(
                [
                    ("misbehave", {"seconds": number / 4e6}),
                    ("take", {"count": number}),
                    ("note", {"text": f"number {number}"}),
                ],
                k=3,
            ):
                yield RawCall(name, json.dumps(arguments))


def end_with_driver() -> None:
    """Die when standard input closes."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """``driver LEVEL FOLDER`` prints its worker and plays; ``worker`` plays."""
    role, level, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if role == "driver":
        worker = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "worker", level, str(folder)],
            stdin=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(temporary(folder, "worker"))},
        )
        sys.stdout.write(process_owner(worker.pid) + "\n")
        sys.stdout.flush()
    else:
        end_with_driver()
    asyncio.run(Player(level, folder, role).play())


if __name__ == "__main__":
    main()
