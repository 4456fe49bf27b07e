"""ProcessBox: a box that is a process of this machine, whatever isolates it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.backends import cgroup
from sandbox.backends.base import Level
from sandbox.backends.framed_box import FramedBox
from sandbox.backends.printable import printable
from sandbox.backends.processes import children_of, kill_if_there, marked_processes
from sandbox.backends.wire import Channel, SocketChannel
from sandbox.errors import SandboxError

_GENTLE_WAIT_S = 0.5
_EXIT_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start. ``fds`` are inherited and closed here after the start; ``cgroups`` and
    ``directories`` are removed when the box ends."""

    argv: Sequence[str]
    level: Level
    env: dict[str, str]
    fds: tuple[int, ...] = ()
    uid: int | None = None
    cgroups: tuple[Path, ...] = ()
    directories: tuple[Path, ...] = field(default=())
    enforced: dict[str, Any] = field(default_factory=dict)
    """The limits that hold, as ``sandbox.backends.base.Box.enforced`` shows them."""


class ProcessBox(FramedBox):
    """Implements ``sandbox.backends.base.Box``. One request at a time.

    The parent-death signal of the box is bound to the *thread* that opens it: open boxes in a
    thread that lives as long as they shall (the event loop's).
    """

    def __init__(
        self, box_id: str, launch: Launch, process: subprocess.Popen[bytes], channel: Channel
    ) -> None:
        super().__init__(box_id, launch.level, channel)
        self.enforced = launch.enforced
        self._launch = launch
        self._process = process
        self._exit_status: int | None = None

    @property
    def pid(self) -> int:
        """Outermost process of the box on the host."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Not killed by us and the outermost process has not ended."""
        return self._killing is None and self._process.poll() is None

    @property
    def oom_kills(self) -> int:
        """Processes of this box the kernel killed for memory (level A; else 0)."""
        return cgroup.oom_kills(self._launch.cgroups)

    def note_end(self) -> None:
        """See ``FramedBox``."""
        self._exit_status = self._process.poll()

    def last_words(self) -> str:
        """Last line of the standard error of a box that did not start, else its exit status."""
        stderr = self._process.stderr
        if stderr is None or stderr.closed:
            return f"exit status {self._exit_status}"
        os.set_blocking(stderr.fileno(), False)
        text = stderr.read(65536) or b""
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return printable(lines[-1], most=300) if lines else ""

    async def greet(self, hello: dict[str, Any], timeout_s: float) -> None:
        """See ``FramedBox.greet``."""
        try:
            await super().greet(hello, timeout_s)
        finally:
            if self._process.stderr is not None:
                self._process.stderr.close()

    async def _end(self) -> None:
        """See ``FramedBox``."""
        if self.level is not Level.C:
            # the agent is the init of the box's pid namespace: with it everything inside dies,
            # and bwrap reaps it (killing bwrap first would leave that to the machine's init)
            for pid in children_of(self._process.pid):
                kill_if_there(pid)
        if not await self._exited(_GENTLE_WAIT_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            cgroup.kill_all(self._launch.cgroups)
            await self._exited(_EXIT_WAIT_S)
        if self.level is Level.C:
            for pid in marked_processes(self.box_id):
                kill_if_there(pid)
        deadline = time.monotonic() + _EXIT_WAIT_S
        pause = 0.001
        while not cgroup.remove(self._launch.cgroups, timeout_s=0.0):
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"box {self.box_id}: processes survived SIGKILL for {_EXIT_WAIT_S:g} s in "
                    f"{self._launch.cgroups[0]}; remove it by hand"
                )
            cgroup.kill_all(self._launch.cgroups)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)
        for directory in self._launch.directories:
            shutil.rmtree(directory, ignore_errors=True)

    async def _exited(self, timeout_s: float) -> bool:
        """Wait for the outermost process."""
        deadline = time.monotonic() + timeout_s
        pause = 0.001
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)
        return True


async def open_box(
    box_id: str, launch: Launch, sock: socket.socket, hello: dict[str, Any], timeout_s: float
) -> ProcessBox:
    """Start the process and wait until its agent has loaded the task's code.

    ``sock`` is the host's side; ``launch.fds`` hold the other one.
    """
    try:
        process = subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=launch.env,
            pass_fds=launch.fds,
            start_new_session=True,
            user=launch.uid,
            group=launch.uid,
            extra_groups=None if launch.uid is None else [],
        )
    finally:
        for fd in launch.fds:
            os.close(fd)
    box = ProcessBox(box_id, launch, process, SocketChannel(sock))
    await box.greet(hello, timeout_s)
    return box
