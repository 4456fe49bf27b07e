# ruff: noqa: PTH101, PTH106, PTH108, PTH109, PTH112, PTH114, PTH116, PTH118, PTH123, PTH208
"""The agent inside a box: a clean parent process (zygote) that forks one worker an episode.

Standard library only, and ``os`` calls rather than pathlib's, because it starts with every box.
Shipped as text (``sandbox.backends.wire.BOOTSTRAP``), never imported by the host. Frames on the
host's socket and on the worker's: 4 bytes big-endian length, then JSON. The zygote runs the task
module's top level once; an episode's Python state lives in a worker and dies with it. After
``reset`` the zygote reports a digest of everything a former episode could have left.
"""

from __future__ import annotations

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
PR_SET_CHILD_SUBREAPER = 36
FRAME_LIMIT = 8 << 20


class WorkerDied(Exception):
    """The worker closed its socket or sent nonsense."""


class WorkerLate(Exception):
    """The worker missed its deadline."""


def main(fd: int) -> None:
    """Serve the host until it closes the socket."""
    host = socket.socket(fileno=fd)
    hello = json.loads(receive(host, None))
    try:
        zygote = Zygote(host, hello)
    except Exception as error:  # the task's module may fail to load in any way
        send(host, json.dumps({"value": f"{type(error).__name__}: {error}"[:300]}).encode())
        os._exit(1)
    send(host, json.dumps({"value": zygote.digest()}).encode())
    while True:
        try:
            request = json.loads(receive(host, None))
        except WorkerDied:
            zygote.end_worker()
            os._exit(0)
        send(host, zygote.answer(request["method"], request["params"]))


def receive(sock: socket.socket, deadline: float | None) -> bytes:
    """One frame; WorkerDied at the end of the stream or a frame above the limit."""
    size = int.from_bytes(_exactly(sock, 4, deadline), "big")
    if size > FRAME_LIMIT:
        raise WorkerDied
    return _exactly(sock, size, deadline)


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise WorkerLate
        chunk = sock.recv(min(size - len(data), 1 << 16))
        if not chunk:
            raise WorkerDied
        data += chunk
    return bytes(data)


def send(sock: socket.socket, payload: bytes) -> None:
    """Write one frame."""
    sock.sendall(len(payload).to_bytes(4, "big") + payload)


class Zygote:
    """Owns the worker; see ``answer`` for the methods."""

    def __init__(self, host: socket.socket, hello: dict[str, Any]) -> None:
        self.host = host
        self.workdir = hello["workdir"]
        self.own_pid_namespace = hello["own_pid_namespace"]
        here = os.stat("/proc/self/ns/pid").st_ino
        if self.own_pid_namespace and here == hello["host_pid_namespace"]:
            # reset() kills every process it can see
            raise SystemExit("the box shares the host's pid namespace")
        self.worker: socket.socket | None = None
        self.worker_pid = 0
        libc = ctypes.CDLL(None)
        self.prctl = libc.prctl
        self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.prctl(PR_SET_CHILD_SUBREAPER, 1)
        # a worker has the same uid: without this it could read and write this process's memory
        self.prctl(PR_SET_DUMPABLE, 0)
        os.chdir(self.workdir)
        os.umask(0o077)
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)
        for name, value in hello["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        package = types.ModuleType("sandbox")
        package.__path__ = []
        toolkit = types.ModuleType("sandbox.toolkit")
        sys.modules["sandbox"] = package
        sys.modules["sandbox.toolkit"] = toolkit
        exec(compile(hello["toolkit"], "<toolkit>", "exec"), toolkit.__dict__)
        self.toolkit: Any = toolkit
        toolkit.install_packages(hello["packages"])
        self.module = toolkit.TaskModule(hello["source"], hello["name"])

    def answer(self, method: str, params: dict[str, Any]) -> bytes:
        """Reply frame of one request: ``start``, ``call``, ``end_state``, ``verify``, ``reset``,
        ``ping``."""
        if method == "ping":
            return b'{"value": null}'
        if method == "reset":
            self.wipe()
            return json.dumps({"value": self.digest()}).encode()
        if method in ("start", "verify"):
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
            return receive(self.worker, deadline)
        except WorkerLate:
            error = "timeout"
        except (WorkerDied, OSError):
            error = "died"
        self.end_worker()
        self.fork_worker()
        return json.dumps({"value": method, "error": error}).encode()

    def fork_worker(self) -> None:
        """A fresh copy of this process with a socket of its own."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self.host.close()
                os.setsid()
                self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self.prctl(PR_SET_DUMPABLE, 1)
                # short of memory, the kernel takes the worker and not the agent
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")
                self.work(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self.worker, self.worker_pid = ours, pid

    def work(self, sock: socket.socket) -> None:
        """The worker's loop; it never returns."""
        while True:
            try:
                method, params = json.loads(receive(sock, None))
            except WorkerDied:
                os._exit(0)
            send(
                sock,
                json.dumps(self.toolkit.run(self.module, self.workdir, method, params)).encode(),
            )

    def end_worker(self) -> None:
        """Kill the worker and everything it started, and reap it."""
        if self.worker is not None:
            self.worker.close()
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
        for entry in os.listdir(self.workdir):
            self.remove(os.path.join(self.workdir, entry))
        os.chmod(self.workdir, 0o700)
        os.utime(self.workdir, (0, 0))

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
            "fds": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
            "num_processes": len(pids) if self.own_pid_namespace else len(self.children()),
            "environment": sorted(os.environ.items()),
            "rlimits": [resource.getrlimit(number) for number in range(16)],
            "affinity": sorted(os.sched_getaffinity(0)),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "cwd": os.getcwd(),
        }
