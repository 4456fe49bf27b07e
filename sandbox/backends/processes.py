"""Processes of a box, seen from the host."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from infra.processes import marked_with

BOX_VARIABLE = "PARL_BOX"
"""In the environment of every process of a box."""


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


def marked_processes(*box_ids: str) -> list[int]:
    """Running processes whose environment says they belong to one of the boxes (as far as we may
    look)."""
    return marked_with(BOX_VARIABLE, box_ids)
