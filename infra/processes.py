"""Processes of this machine that carry a mark: a variable in the environment they started with.

Whoever starts a tree of processes and must later name its own, also those whose parent is dead,
sets a variable and asks here. Imports nothing but the standard library, because a reaper that runs
after a crash must start at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

_PROC = Path("/proc")


def environments() -> Iterator[tuple[int, list[bytes]]]:
    """(pid, ``NAME=value`` entries) of each process whose environment we may read.

    It is the environment the process was started with; what it set later does not show. Left out:
    processes of other users (unless we are root), those that ended meanwhile and kernel threads.
    """
    for directory in _PROC.iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            environment = (directory / "environ").read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # of another user, or it has just ended
        if environment:
            yield int(directory.name), environment.split(b"\0")


def marked_with(variable: str, values: Collection[str]) -> list[int]:
    """Running processes started with ``variable`` set to one of ``values``, in order of pid."""
    wanted = {f"{variable}={value}".encode() for value in values}
    if not wanted:
        return []
    return sorted(pid for pid, entries in environments() if not wanted.isdisjoint(entries))
