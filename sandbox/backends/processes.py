"""Processes of a box, seen from the host."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Direct children of a process; none when it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in text.split()]


def kill_if_there(pid: int) -> None:
    """SIGKILL; a process that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked_processes(box_id: str) -> list[int]:
    """Running processes whose environment says they belong to the box (as far as we may look)."""
    marker = f"PARL_BOX={box_id}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            environment = (directory / "environ").read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        if marker in environment.split(b"\0"):
            found.append(int(directory.name))
    return found
