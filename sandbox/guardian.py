"""A process beside the owner of boxes that outlives it by a moment and removes what it left.

The kernel ends a killed owner's bubblewrap boxes and the engine its containers, but cgroup
directories, working directories and a container that was just being made stay until somebody reaps
their leases. The guardian does that at once: it reads footprints from a pipe, and when the pipe
ends it reaps what has not been taken back. It sits in a session of its own, so a signal to the
owner's process group does not reach it; when it is killed too, the leases still name everything.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_SOURCE = (
    "import sys,json\n"
    "left={}\n"
    "for line in sys.stdin:\n"
    " name,data=json.loads(line)\n"
    " if data is None:left.pop(name,None)\n"
    " else:left[name]=data\n"
    "if left:\n"
    " sys.path.insert(0,sys.argv[1])\n"
    " from sandbox.guardian import reap_all\n"
    " reap_all(left.values())\n"
)
"""Imports nothing of ours until it is needed: it waits in 8 MiB."""


_LATE_S = 3.0
"""An engine may finish the creation of a container after the client that asked is dead."""


class Guardian:
    """Owns the process; starts it with the first footprint, and again if somebody ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._left: dict[str, dict[str, Any]] = {}

    def watch(self, box_id: str, data: dict[str, Any]) -> None:
        """From now on ``data`` (as ``sandbox.reaper.reap_box`` takes it) is reaped if we die."""
        self._left[box_id] = data
        if self._process is None or self._process.poll() is not None:
            self._start()
        else:
            self._say(box_id, data)

    def forget(self, box_id: str) -> None:
        """The box is gone."""
        if self._left.pop(box_id, None) is not None:
            self._say(box_id, None)

    def close(self) -> None:
        """End the process, which reaps what was not forgotten; waits for it."""
        if self._process is not None:
            assert self._process.stdin is not None, "opened with a pipe"
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _SOURCE, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        for box_id, data in self._left.items():
            self._say(box_id, data)

    def _say(self, box_id: str, data: dict[str, Any] | None) -> None:
        assert self._process is not None and self._process.stdin is not None, "watch starts it"
        # a guardian that somebody killed is started again by the next watch
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([box_id, data]) + "\n")
            self._process.stdin.flush()


def footprint_of_folder(name: str, folder: Path) -> dict[str, Any]:
    """What ``watch`` takes for a folder that belongs to no box."""
    from sandbox.reaper import process_host

    return {
        "box_id": name,
        "host": process_host(),
        "process": None,
        "cgroups": [],
        "directories": [str(folder)],
    }


def reap_all(left: Iterable[dict[str, Any]]) -> None:
    """Reap every footprint; one that fails does not stop the others. The first error is raised."""
    from sandbox.reaper import reap_box

    errors: list[Exception] = []
    footprints = list(left)
    for wait_s, chosen in (
        (0.0, footprints),
        (_LATE_S, [data for data in footprints if data.get("containers")]),
    ):
        time.sleep(wait_s if chosen else 0.0)
        for data in chosen:
            try:
                reap_box(data)
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]
