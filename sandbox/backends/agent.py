# ruff: noqa: PTH101, PTH106, PTH108, PTH109, PTH112, PTH114, PTH116, PTH118, PTH123, PTH208
"""The agent inside a box: a clean parent process (zygote) that forks one worker an episode.

Standard library only, and ``os`` calls rather than pathlib's, because it starts with every box.
Shipped as text (``sandbox.backends.wire.BOOTSTRAP``), never imported by the host. Frames on the
host's stream and on the worker's: 4 bytes big-endian length, then JSON. The zygote runs the task
module's top level once; an episode's Python state lives in a worker and dies with it. After
``reset`` the zygote reports a digest of everything a former episode could have left. When the
host's stream ends, also in the middle of a call, the box ends.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
FRAME_LIMIT = 8 << 20


class WorkerDied(Exception):
    """The worker closed its socket or sent nonsense."""


class WorkerLate(Exception):
    """The worker missed its deadline."""


class HostGone(Exception):
    """The host closed its end."""


def main(fd_in: int, fd_out: int) -> None:
    """Serve the host until it closes the stream."""
    # away from 0-2, which the task's code gets as /dev/null
    host_in, host_out = os.dup(fd_in), os.dup(fd_out)
    os.close(fd_in)
    if fd_out != fd_in:
        os.close(fd_out)
    hello = json.loads(receive(host_in, None))
    try:
        zygote = Zygote((host_in, host_out), hello)
    except Exception as error:  # the task's module may fail to load in any way
        send(host_out, json.dumps({"value": f"{type(error).__name__}: {error}"[:300]}).encode())
        os._exit(1)
    send(host_out, json.dumps({"value": zygote.digest()}).encode())
    while True:
        try:
            request = json.loads(receive(host_in, None))
            send(host_out, zygote.answer(request["method"], request["params"]))
        except (WorkerDied, HostGone, BrokenPipeError):
            zygote.end_worker()
            os._exit(0)


def receive(fd: int, deadline: float | None, host: int | None = None) -> bytes:
    """One frame; WorkerDied at the end of the stream or a frame above the limit, HostGone when
    ``host`` ends meanwhile."""
    size = int.from_bytes(_exactly(fd, 4, deadline, host), "big")
    if size > FRAME_LIMIT:
        raise WorkerDied
    return _exactly(fd, size, deadline, host)


def _exactly(fd: int, size: int, deadline: float | None, host: int | None) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if host is not None:
        poll.register(host, select.POLLRDHUP)  # and POLLHUP, which is always reported
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            events = poll.poll(left * 1000) if left > 0 else []
            if any(ready == host for ready, _ in events):
                raise HostGone
            if not events:
                raise WorkerLate
        chunk = os.read(fd, min(size - len(data), 1 << 16))
        if not chunk:
            raise WorkerDied
        data += chunk
    return bytes(data)


def send(fd: int, payload: bytes) -> None:
    """Write one frame."""
    view = memoryview(len(payload).to_bytes(4, "big") + payload)
    while view:
        view = view[os.write(fd, view) :]


class Zygote:
    """Owns the worker; see ``answer`` for the methods."""

    def __init__(self, host: tuple[int, int], hello: dict[str, Any]) -> None:
        self.host = host
        self.workdir = hello["workdir"]
        self.folders = hello["folders"]  # [path, seed, mode] of an image, writable like workdir
        self.own_pid_namespace = hello["own_pid_namespace"]
        here = os.stat("/proc/self/ns/pid").st_ino
        if self.own_pid_namespace and here == hello["host_pid_namespace"]:
            # reset() kills every process it can see
            raise SystemExit("the box shares the host's pid namespace")
        self.worker: int | None = None
        libc = ctypes.CDLL(None, use_errno=True)
        self.prctl = libc.prctl
        if hello["parent_death_signal"]:
            self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.prctl(PR_SET_CHILD_SUBREAPER, 1)
        # a worker has the same uid: without this it could read and write this process's memory
        self.prctl(PR_SET_DUMPABLE, 0)
        os.chdir(self.workdir)
        os.chmod(self.workdir, 0o700)
        os.umask(0o077)
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)
        for name, value in hello["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        if hello["seccomp"]:
            self.filter_calls(base64.b64decode(hello["seccomp"]))
        package = types.ModuleType("sandbox")
        package.__path__ = []
        toolkit = types.ModuleType("sandbox.toolkit")
        sys.modules["sandbox"] = package
        sys.modules["sandbox.toolkit"] = toolkit
        exec(compile(hello["toolkit"], "<toolkit>", "exec"), toolkit.__dict__)
        self.toolkit: Any = toolkit
        files: Any = types.ModuleType("files")
        exec(compile(hello["files"], "<files>", "exec"), files.__dict__)
        self.files = files
        toolkit.install_packages(hello["packages"])
        self.module = toolkit.TaskModule(hello["source"], hello["name"])

    def answer(self, method: str, params: dict[str, Any]) -> bytes:
        """Reply frame of one request: ``start``, ``call``, ``end_state``, ``verify``, the
        file methods, ``reset``, ``ping``."""
        if method == "ping":
            return b'{"value": null}'
        if method == "reset":
            self.wipe()
            return json.dumps({"value": self.digest()}).encode()
        if method in ("start", "verify", "end_state", "list_files"):
            # what judges or collects runs in a clean process, with no other one beside it
            self.end_worker()
            self.fork_worker()
        reply = self.ask_worker(method, params)
        if method == "verify":
            self.end_worker()
        return reply

    def ask_worker(self, method: str, params: dict[str, Any]) -> bytes:
        """Forward to the worker. A late or dead one is replaced: files stay, Python state not."""
        if self.worker is None:
            return b'{"value": "no worker: start first", "error": "crash"}'
        deadline = time.monotonic() + params["timeout_s"]
        try:
            send(self.worker, json.dumps([method, params]).encode())
            return receive(self.worker, deadline, self.host[0])
        except WorkerLate:
            error = "timeout"
        except (WorkerDied, OSError):
            error = "died"
        self.end_worker()
        self.fork_worker()
        return json.dumps({"value": method, "error": error}).encode()

    def fork_worker(self) -> None:
        """A fresh copy of this process with a socket of its own."""
        ours, theirs = (end.detach() for end in socket.socketpair())
        pid = os.fork()
        if pid == 0:
            try:
                for fd in (ours, *self.host):
                    os.close(fd)
                os.setsid()
                self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self.prctl(PR_SET_DUMPABLE, 1)
                # short of memory, the kernel takes the worker and not the agent
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")
                self.work(theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        self.worker = ours

    def work(self, fd: int) -> None:
        """The worker's loop; it never returns."""
        while True:
            try:
                method, params = json.loads(receive(fd, None))
            except WorkerDied:
                os._exit(0)
            if method in ("start", "verify"):
                self.files.fill(self.folders)
            if method in self.files.FILE_METHODS:
                answer = self.files.run(self.workdir, method, params)
            else:
                answer = self.toolkit.run(self.module, self.workdir, method, params)
            send(fd, json.dumps(answer).encode())

    def filter_calls(self, program: bytes) -> None:
        """Install a seccomp program for this process and all that follow (``sandbox.backends
        .seccomp``); SystemExit when the kernel refuses it."""

        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

        filters = Program(len(program) // 8, program)
        if self.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or self.prctl(
            PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filters), 0, 0
        ):
            raise SystemExit(f"seccomp: {os.strerror(ctypes.get_errno())}")

    def end_worker(self) -> None:
        """Kill the worker and everything it started, and reap it."""
        if self.worker is not None:
            os.close(self.worker)
            self.worker = None
        if self.own_pid_namespace:
            try:
                os.kill(-1, signal.SIGKILL)  # spares this process, the namespace's init
            except ProcessLookupError:
                return
            self.reap(block=True)
            return
        while True:
            children = self.children()
            if not children:
                return
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # only this one: its orphans become children now

    def children(self) -> list[int]:
        """Direct children; orphans of dead workers come here too (child subreaper)."""
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]

    def reap(self, block: bool) -> None:
        """Collect dead children."""
        while True:
            try:
                pid, _ = os.waitpid(-1, 0 if block else os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return

    def wipe(self) -> None:
        """Empty the working directory. What cannot be removed shows up in the digest."""
        self.end_worker()
        for place, _, mode in [[self.workdir, None, 0o700], *self.folders]:
            os.chmod(place, 0o700)
            for entry in os.listdir(place):
                self.remove(os.path.join(place, entry))
            os.chmod(place, mode)
            os.utime(place, (0, 0))

    def remove(self, path: str) -> None:
        """Delete a tree without following links."""
        try:
            if not os.path.isdir(path) or os.path.islink(path):
                os.unlink(path)
                return
            os.chmod(path, 0o700)
            for entry in os.listdir(path):
                self.remove(os.path.join(path, entry))
            os.rmdir(path)
        except (OSError, RecursionError):
            return  # the digest differs, and the host throws the box away

    def digest(self) -> dict[str, Any]:
        """Everything a former episode could have left behind, as plain JSON."""
        self.reap(block=False)
        state = os.stat(self.workdir)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return {
            "files": sorted(os.listdir(self.workdir)),
            "workdir": [oct(state.st_mode), state.st_uid, sorted(os.listxattr(self.workdir))],
            "folders": [
                [path, sorted(os.listdir(path)), oct(os.stat(path).st_mode), os.listxattr(path)]
                for path, _, _ in self.folders
            ],
            "fds": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
            "num_processes": len(pids) if self.own_pid_namespace else len(self.children()),
            "environment": sorted(os.environ.items()),
            "rlimits": [resource.getrlimit(number) for number in range(16)],
            "affinity": sorted(os.sched_getaffinity(0)),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "policy": os.sched_getscheduler(0),
            "cwd": os.getcwd(),
        }
