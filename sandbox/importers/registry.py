"""Importers by the name of the format."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

from sandbox.errors import TaskError
from sandbox.importers.base import ImportResult

FORMATS = {
    "harbor": "sandbox.importers.harbor:import_harbor",
    "terminal-bench": "sandbox.importers.terminal_bench:import_terminal_bench",
    "nemo-gym": "sandbox.importers.nemo_gym:import_nemo_gym",
    "tau2": "sandbox.importers.tau2:import_tau2",
    "bfcl": "sandbox.importers.bfcl:import_bfcl",
}
SOURCES = {
    "harbor": "a task folder with task.toml, or a folder of them",
    "terminal-bench": "a task folder with task.yaml, or a folder of them",
    "nemo-gym": "a file of JSON lines, one task a line",
    "tau2": "the folder of one domain with tasks.json, db.json and tools.py",
    "bfcl": "a file of JSON lines, one question a line; answers in it or in possible_answer/",
}
"""What the source of each format must be."""
_TAU2_FILES = ("tasks.json", "db.json", "tools.py")
Importer = Callable[[Path, Path, int], ImportResult]
"""(source, destination, at most so many tasks or 0)"""


def import_from(format_name: str, source: Path, dest: Path, limit: int = 0) -> ImportResult:
    """Write task folders below ``dest``; TaskError for an unknown format or a source that is
    missing or of another kind than SOURCES says."""
    if format_name not in FORMATS:
        near = difflib.get_close_matches(format_name, FORMATS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"unknown format {format_name!r}; known: {', '.join(FORMATS)}{hint}")
    if not source.exists():
        raise TaskError(f"{source}: does not exist; SRC of {format_name} is {SOURCES[format_name]}")
    problem = _problem(format_name, source)
    if problem is not None:
        raise TaskError(f"{source}: {problem}; SRC of {format_name} is {SOURCES[format_name]}")
    module, _, name = FORMATS[format_name].partition(":")
    importer: Importer = getattr(importlib.import_module(module), name)
    return importer(source, dest, limit)


def _problem(format_name: str, source: Path) -> str | None:
    """Why ``source`` cannot be what the format needs."""
    if format_name in ("nemo-gym", "bfcl"):
        return "is a folder" if source.is_dir() else None
    if not source.is_dir():
        return "is a file"
    missing = [name for name in _TAU2_FILES if not (source / name).is_file()]
    return f"has no {', '.join(missing)}" if format_name == "tau2" and missing else None
