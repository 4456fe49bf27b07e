"""Who owns a lease: a process, named so that a later one is not taken for it.

Apart from ``infra.leases`` because a reaper that runs after a crash must start at once, without the
database behind it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from infra.errors import LedgerError


class LeaseError(LedgerError):
    """The lease is held by somebody else, or it was taken away after its deadline."""


def process_owner(pid: int | None = None) -> str:
    """``host:pid:starttime`` of a process of this machine (Linux), default ours.

    host carries boot and pid namespace, for two containers may share a host name; starttime (clock
    ticks since boot) tells a process from a later one with the same pid.
    """
    pid = os.getpid() if pid is None else pid
    start = _start_time(pid)
    if start is None:
        raise LeaseError(f"process {pid} does not run, so it cannot own a lease")
    return f"{_host()}:{pid}:{start}"


def is_dead(owner: str) -> bool:
    """True when the owner was a process of this machine and is gone; False when unknown."""
    host, _, process = owner.partition("#")[0].partition(":")
    pid, _, start = process.partition(":")
    if host != _host() or not pid.isdigit():
        return False
    return _start_time(int(pid)) != start


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return f"{platform.node()}/{boot}-{namespace}"


def _start_time(pid: int) -> str | None:
    """Field 22 of /proc/<pid>/stat; None when no such process runs (a zombie does not run)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command in field 2 may hold spaces and brackets
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
