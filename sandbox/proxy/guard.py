"""Keeper of a child process that must not outlive the proxy; standard library only.

``python -I -S guard.py PARENT_PID OPTIONS COMMAND ARGS...`` runs the command with the standard
streams it got. When the proxy dies, even by kill -9, the kernel sends this process SIGTERM; it then
kills the command and everything the command started (it adopts orphans, so a daemon does not get
away). It does the same when the command ends by itself, and exits with the command's status.

OPTIONS is a JSON object: ``cgroups`` are removed at the end, ``max_line_bytes`` bounds a line of
the command's output (a longer one ends the command), null for no bound.

The command has a temporary folder of its own (``TMPDIR``), which goes with it: SIGKILL leaves it no
chance to tidy up.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> NoReturn:
    """Run ``sys.argv[3:]``; exit code 127 when it cannot be executed."""
    parent, options, command = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    cgroups, max_line = options["cgroups"], options["max_line_bytes"]
    libc = ctypes.CDLL(None, use_errno=True)
    folder = f"{os.environ.get('TMPDIR', '/tmp')}/parl-guard-{os.urandom(8).hex()}"
    signal.signal(signal.SIGTERM, lambda *_: _end(143, folder, cgroups))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(143)
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102
    except OSError as error:
        sys.stderr.write(f"{folder}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)
    os.environ["TMPDIR"] = folder
    guard = os.getpid()
    read, write = (-1, 1) if max_line is None else os.pipe()
    child = os.fork()
    if child == 0:
        if write != 1:
            os.dup2(write, 1)
        _become(libc, guard, command)
    for descriptor in {0, write}:  # the proxy must see the command's end of file, not ours
        os.close(descriptor)
    if max_line is not None:
        relay = threading.Thread(target=_relay, args=(read, max_line), daemon=True)
        relay.start()
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            _end(os.waitstatus_to_exitcode(status) & 0xFF, folder, cgroups)


def _become(libc: ctypes.CDLL, guard: int, command: list[str]) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # in case the guard itself is killed
    if os.getppid() != guard:
        os._exit(143)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold its environment
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _relay(read: int, max_line: int) -> None:
    """Copy the command's output; a line without end would fill the memory of whoever reads it."""
    length = 0
    while chunk := os.read(read, 1 << 16):
        first, *others = chunk.split(b"\n")
        length += len(first)
        longest = max([length, *map(len, others[:-1])])
        length = len(others[-1]) if others else length
        if max(longest, length) > max_line:
            sys.stderr.write(f"a line of over {max_line} bytes; ended\n")
            sys.stderr.flush()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            return
        try:
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
        except BrokenPipeError:  # nobody reads any more; the command may find out
            break
    os.close(read)
    os.close(1)


def _end(code: int, folder: str, cgroups: list[str]) -> NoReturn:
    """Kill all descendants, those that were orphaned meanwhile too, remove folder and cgroups,
    exit."""
    while children := _children():
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # one at a time: the children of the one that ended are ours now and not killed yet
        os.waitpid(-1, 0)
    for thread in threading.enumerate():  # what the command said last is on its way
        if thread is not threading.current_thread():
            thread.join(1.0)
    for _ in range(200):
        cgroups = [path for path in cgroups if not _removed(path)]
        if not cgroups:
            break
        time.sleep(0.01)  # the kernel is not done with the last process
    # rm: any depth, and quicker than the modules that could do it here
    os.waitpid(os.posix_spawnp("rm", ["rm", "-rf", "--", folder], os.environ), 0)
    os._exit(code)


def _removed(cgroup: str) -> bool:
    try:
        os.rmdir(cgroup)  # noqa: PTH106
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    main()
