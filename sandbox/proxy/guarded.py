"""Command lines of processes that end with the proxy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import sandbox

_GUARD = Path(__file__).with_name("guard.py")
_ROOT = Path(sandbox.__path__[0]).parent
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


def guarded(command: Sequence[str]) -> list[str]:
    """``command`` under the guard, with a ``TMPDIR`` that ends with it; start it from the thread
    that runs the event loop, the kernel watches the thread that forked."""
    return [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), *command]


def python_module(module: str, *arguments: str) -> list[str]:
    """This interpreter running a module of PARL, isolated from the environment and the current
    directory."""
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-I", "-c", code, *arguments]


def clean_environment() -> dict[str, str]:
    """What a child may see of our environment: no credentials."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}
