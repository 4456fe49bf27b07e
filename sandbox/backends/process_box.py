"""ProcessBox: a box that is a process of this machine, whatever isolates it."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from sandbox.backends.base import Level, Reply
from sandbox.backends.processes import children_of, kill_if_there, marked_processes
from sandbox.backends.wire import agent_source, receive_json, send_frame
from sandbox.errors import SandboxError, SandboxLost, TaskError

_GENTLE_WAIT_S = 0.5
_EXIT_WAIT_S = 5.0
_RESET_TIMEOUT_S = 10.0


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


class ProcessBox:
    """Implements ``sandbox.backends.base.Box``. One request at a time.

    The parent-death signal of the box is bound to the *thread* that opens it: open boxes in a
    thread that lives as long as they shall (the event loop's).
    """

    def __init__(
        self, box_id: str, launch: Launch, process: subprocess.Popen[bytes], sock: socket.socket
    ) -> None:
        self.box_id = box_id
        self.level = launch.level
        self._launch = launch
        self._process = process
        self._sock = sock
        self._busy = False
        self._killing: asyncio.Task[None] | None = None
        self._pristine: Any = None

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

    async def request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
        """See ``Box.request``."""
        if self._busy:
            raise SandboxError(f"box {self.box_id}: {method} while another request is running")
        if self._killing is not None:
            raise SandboxLost(f"box {self.box_id}: {method} after its end")
        self._busy = True
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                payload = json.dumps({"method": method, "params": params}).encode()
                await send_frame(self._sock, payload)
                answer = await receive_json(self._sock)
            return Reply(answer["value"], answer.get("error"), time.perf_counter() - begin)
        except TimeoutError as error:
            await self.kill()
            raise SandboxLost(
                f"box {self.box_id}: {method} not answered within {timeout_s:g} s; killed"
            ) from error
        except (OSError, EOFError, ValueError, KeyError, RecursionError) as error:
            code = self._process.poll()
            await self.kill()
            raise SandboxLost(
                f"box {self.box_id}: {method}: {error} (exit status {code}); killed"
            ) from error
        except asyncio.CancelledError:
            await self.kill()  # the reply is still on its way and would answer the next request
            raise
        finally:
            self._busy = False

    async def reset(self) -> bool:
        """Kill the worker, empty the working directory, and compare with the state at birth."""
        reply = await self.request("reset", {}, _RESET_TIMEOUT_S)
        return reply.value == self._pristine

    async def kill(self) -> None:
        """End every process and free what the box held; goes on when the caller is cancelled."""
        if self._killing is None:
            self._killing = asyncio.ensure_future(self._kill())
        await asyncio.shield(self._killing)

    async def _kill(self) -> None:
        self._sock.close()
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

    async def greet(self, hello: dict[str, Any], timeout_s: float) -> None:
        """Feed the agent and the task's code. TaskError when that code does not load, SandboxLost
        with the box's last words when the agent does not come up."""
        try:
            async with asyncio.timeout(timeout_s):
                await send_frame(self._sock, agent_source())
                await send_frame(self._sock, json.dumps(hello).encode())
                self._pristine = (await receive_json(self._sock))["value"]
        except (TimeoutError, OSError, EOFError, ValueError, KeyError, RecursionError) as error:
            await self.kill()
            raise SandboxLost(
                f"box {self.box_id} did not start: {self._last_words() or error!r}"
            ) from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        finally:
            if self._process.stderr is not None:
                self._process.stderr.close()
        if not isinstance(self._pristine, dict):
            await self.kill()
            raise TaskError(f"{hello['name']} does not load: {self._pristine!r:.300}")

    def _last_words(self) -> str:
        """Last line of the standard error of a box that has ended."""
        assert self._process.stderr is not None, "greet closes it, and asks before"
        os.set_blocking(self._process.stderr.fileno(), False)
        text = self._process.stderr.read(65536) or b""
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


async def open_box(
    box_id: str, launch: Launch, sock: socket.socket, hello: dict[str, Any], timeout_s: float
) -> ProcessBox:
    """Start the process and wait until its agent has loaded the task's code.

    ``sock`` is the host's side; ``launch.fds`` hold the other one.
    """
    sock.setblocking(False)
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
    box = ProcessBox(box_id, launch, process, sock)
    await box.greet(hello, timeout_s)
    return box
