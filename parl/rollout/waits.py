"""Who waits for what: every await of a rollout has an owner, a deadline and a line in a file.

The file is written by a thread of its own, so that it stays true when the event loop hangs.
`parl doctor` reads it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from parl.errors import WaitTimeout


@dataclass(frozen=True, slots=True)
class Wait:
    """``since`` and ``deadline`` are epoch seconds."""

    owner: str
    what: str
    since: float
    deadline: float


class Waits:
    """The open waits of one worker. Opened in its event loop, read from any thread."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._open: dict[int, Wait] = {}
        self._ids = itertools.count()

    @asynccontextmanager
    async def on(self, owner: str, what: str, timeout_s: float) -> AsyncIterator[None]:
        """Run the body under a deadline; WaitTimeout when it passes."""
        key, now = next(self._ids), time.time()
        self._open[key] = Wait(owner, what, now, now + timeout_s)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                yield
        except TimeoutError as error:
            if limit.expired():
                raise WaitTimeout(owner, what, timeout_s) from error
            raise
        finally:
            del self._open[key]

    def snapshot(self) -> list[Wait]:
        """Longest wait first."""
        return sorted(self._open.values(), key=lambda wait: wait.since)

    def dump(self, path: Path) -> None:
        """Write the open waits as JSON, atomically."""
        data = {
            "worker": self.worker,
            "pid": os.getpid(),
            "written_at": time.time(),
            "waits": [asdict(wait) for wait in self.snapshot()],
        }
        temp = path.with_name(f"{path.name}.tmp")
        temp.write_text(json.dumps(data))
        temp.replace(path)


class WaitsFile:
    """Dumps ``waits`` every ``interval_s`` while open, and once more on leaving."""

    def __init__(self, waits: Waits, path: Path, interval_s: float = 1.0) -> None:
        self._waits = waits
        self._path = path
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._dump_until_closed, name=f"waits-{waits.worker}", daemon=True
        )

    def __enter__(self) -> WaitsFile:
        self._waits.dump(self._path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._waits.dump(self._path)

    def _dump_until_closed(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._waits.dump(self._path)
