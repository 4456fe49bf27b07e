"""Which Python runs inside a box, and what of the host's file system it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import BackendUnavailable

SYSTEM_PYTHON = Path("/usr/bin/python3")
_CHECK = "import sqlite3, ctypes, resource, ast, json"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """``binds``: host directories to show read-only at the same place; ``links``: symbolic links
    (name, target) that stand for them; ``hidden``: directories below ``binds`` to cover up;
    ``library_path``: where a Python outside /usr keeps libpython (the box has no ld.so.cache)."""

    path: Path
    binds: tuple[Path, ...]
    links: tuple[tuple[Path, str], ...]
    hidden: tuple[Path, ...]
    library_path: Path | None = None


def find_interpreter() -> Interpreter:
    """The system's Python if it is complete, else the one under this process.

    BackendUnavailable when neither can be run by another user (a Python below root's home cannot).
    """
    tried = []
    for path in (SYSTEM_PYTHON, Path(sys.base_prefix) / "bin" / "python3"):
        problem = _problem(path)
        if problem is None:
            return _layout(path)
        tried.append(f"{path}: {problem}")
    raise BackendUnavailable(
        f"no Python for the box ({'; '.join(tried)}); install the system's python3 with sqlite3"
    )


def _problem(path: Path) -> str | None:
    if not path.exists():
        return "does not exist"
    if os.geteuid() == 0:
        real = path.resolve()
        for directory in real.parents:
            if not directory.stat().st_mode & 0o001:
                return f"{directory} is closed to other users"
    command = [str(path), "-I", "-S", "-c", _CHECK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


def _layout(path: Path) -> Interpreter:
    binds: list[Path] = [Path("/usr/bin"), Path("/usr/lib")]
    links: list[tuple[Path, str]] = []
    for library in (Path("/usr/lib64"), Path("/usr/lib32"), Path("/lib"), Path("/lib64")):
        if library.is_symlink():
            links.append((library, str(library.readlink())))
        elif library.is_dir():
            binds.append(library)
    hidden = [directory for directory in (Path("/usr/lib/python3"),) if directory.is_dir()]
    real = path.resolve()
    prefix = real.parents[1]
    if prefix != Path("/usr"):
        binds += [prefix / "bin", prefix / "lib"]
        # site-packages may hold PARL itself: the answers and verifiers of shipped tasks
        hidden += sorted(prefix.glob("lib/python3*/site-packages"))
        return Interpreter(real, tuple(binds), tuple(links), tuple(hidden), prefix / "lib")
    return Interpreter(real, tuple(binds), tuple(links), tuple(hidden))
