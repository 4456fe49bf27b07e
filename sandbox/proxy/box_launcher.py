"""Starts a program's box: limits, then bwrap in place of this process. Standard library and
``sandbox.backends.cgroup`` only; runs under the guard, which removes the cgroups.

Root's own directories (/root, pytest's) are closed to the box's user, and a Python below them with
them. Root therefore shows just the paths that are to be in the box: in a mount namespace of its
own, an empty directory over each closed one, and the paths bound back to their places.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from sandbox.backends import cgroup
from sandbox.errors import SandboxError

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


def main() -> NoReturn:
    """``sys.argv[1]``: JSON object of ``sandbox.proxy.boxes``; exit code 71 when a limit or mount
    cannot be had."""
    launch = json.loads(sys.argv[1])
    try:
        groups = tuple(map(Path, launch["cgroups"]))
        if groups:
            cgroup.create(groups, launch["version"], cgroup.CgroupLimits(**launch["limits"]))
        if os.geteuid() == 0:
            _open_up([Path(path) for path in launch["paths"]])
    except (OSError, SandboxError) as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(71)
    filter_fd = _memory_file(base64.b64decode(launch["seccomp"]))
    arguments = [*launch["arguments"], "--seccomp", str(filter_fd)]
    arguments_fd = _memory_file(b"".join(os.fsencode(text) + b"\0" for text in arguments))
    outer = launch["outer"]
    os.execv(outer[0], [*outer, "--args", str(arguments_fd), "--", *launch["command"]])


def closed_directory(path: Path) -> Path | None:
    """The outermost directory above ``path`` that other users may not enter."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & 0o001:
            return directory
    return None


def _open_up(paths: list[Path]) -> None:
    found = [(path, directory) for path in paths if (directory := closed_directory(path))]
    if not found:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _succeed(libc.unshare(_CLONE_NEWNS), "unshare")
    _succeed(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "/")
    closed: dict[Path, list[tuple[Path, int]]] = {}
    for path, directory in found:  # held in the new namespace: none can be bound into another
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        closed.setdefault(directory, []).append((path, held))
    for directory, inside in closed.items():
        here = os.fsencode(directory)
        _succeed(libc.mount(b"tmpfs", here, b"tmpfs", 0, b"mode=755,size=1m"), directory)
        for path, held in inside:
            source = f"/proc/self/fd/{held}"
            if Path(source).is_dir():
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            flags = _MS_BIND | _MS_REC
            _succeed(libc.mount(source.encode(), os.fsencode(path), None, flags, None), path)
            os.close(held)


def _succeed(result: int, what: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(what))


def _memory_file(content: bytes) -> int:
    """An inherited anonymous file with ``content``, at its start."""
    fd = os.memfd_create("parl", 0)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    return fd
