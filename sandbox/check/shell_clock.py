"""Another day in a shell world: ``date`` and ``python3`` in front of the real ones, by PATH.

Not reached: programs that are called by their whole path, and clocks of other programs.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sandbox.check.clock import CLOCK_SOURCE
from sandbox.task import TaskSpec

SHELL_SHIFTS = (timedelta(hours=121), timedelta(days=183), timedelta(days=400),
                timedelta(days=-1095))  # fmt: skip
_FOLDER = "/logs/parl-clock"
_USUAL = "/usr/bin:/bin"
_DATE = """#!/bin/sh
PATH="{path}"
for word in "$@"; do
  case "$word" in -d*|-r*|-f*|--date*|--reference*|--file*) exec date "$@" ;; esac
done
exec date -d "@$(( $(date +%s) + {shift} ))" "$@"
"""
_START = """#!/bin/sh
PARL_PATH="$PATH" PATH="{path}" exec python3 -I -S "$(dirname "$0")/clock.py" "$@"
"""
_PYTHON = """
import os, sys
os.environ["PATH"] = os.environ.pop("PARL_PATH", os.environ.get("PATH", ""))
_PARL_PREAMBLE = {preamble!r}
exec(_PARL_PREAMBLE)
_PARL_SHIFT[0] = {shift!r}
words = ["python3", *sys.argv[1:]]
at = 1
while at < len(words) and words[at].startswith("-") and words[at] not in ("-c", "-m", "-"):
    at += 2 if words[at] in ("-X", "-W") else 1
if (at >= len(words) and not sys.stdin.isatty() and len(words) == at) or words[at:at + 1] == ["-"]:
    words[at:at + 1] = ["-c", sys.stdin.read()]
words = _parl_command(words, _PARL_PREAMBLE)
os.execv(sys.executable, [sys.executable, *words[1:]])
"""


def shell_clock_spec(spec: TaskSpec, shift: timedelta) -> TaskSpec:
    """``spec`` with the two programs in its world; the verifier's box is not changed."""
    data = dict(spec.environment.data)
    path = str(data.get("env", {}).get("PATH", _USUAL))
    seconds = int(shift.total_seconds())
    texts = {
        "date": _DATE.format(path=path, shift=seconds),
        "python3": _START.format(path=path),
        "python": _START.format(path=path),
        "clock.py": _PYTHON.format(preamble=CLOCK_SOURCE, shift=float(seconds)),
    }
    files: dict[str, Any] = dict(data["files"])
    for name, text in texts.items():
        coded = base64.b64encode(text.encode()).decode()
        files[f"{_FOLDER}/{name}"] = {"base64": coded, "mode": 0o755}
    environment = {**data.get("env", {}), "PATH": f"{_FOLDER}:{path}"}
    changed = {**data, "files": files, "env": environment}
    return replace(spec, environment=replace(spec.environment, data=changed))
