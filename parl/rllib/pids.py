"""Which process plays which part of a run: <run dir>/actors/<name>.pid, newest incarnation wins.

For people, `parl doctor` and tests that kill; nothing in a run depends on it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = "actors"


def record_pid(run_dir: Path, name: str, pid: int) -> None:
    """Write atomically, so that a reader never sees half a number."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    temp = folder / f".{name}.tmp"
    temp.write_text(f"{pid}\n")
    temp.replace(folder / f"{name}.pid")


def read_pids(run_dir: Path) -> dict[str, int]:
    """Pid by name ("runner-1", "engine-0"); a process may have ended since."""
    files = sorted((run_dir / FOLDER).glob("*.pid"))
    return {path.stem: int(path.read_text()) for path in files}
