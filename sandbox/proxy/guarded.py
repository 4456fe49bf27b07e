"""Command lines of processes that end with the proxy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import sandbox

_GUARD = Path(__file__).with_name("guard.py")
ROOT = Path(sandbox.__path__[0]).parent
"""Where PARL's packages lie."""
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


def guarded(
    command: Sequence[str], cgroups: Sequence[Path] = (), max_line_bytes: int | None = None
) -> list[str]:
    """``command`` under the guard, with a ``TMPDIR`` that ends with it; start it from the thread
    that runs the event loop, the kernel watches the thread that forked. ``cgroups`` are removed at
    the end; a line of its output over ``max_line_bytes`` ends it."""
    options = {"cgroups": [str(path) for path in cgroups], "max_line_bytes": max_line_bytes}
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), json.dumps(options)]
    return [*guard, *command]


def python_module(module: str, *arguments: str) -> list[str]:
    """This interpreter running a module of PARL, isolated from the environment and the current
    directory."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-I", "-c", code, *arguments]


def clean_environment() -> dict[str, str]:
    """What a child may see of our environment: no credentials."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}
