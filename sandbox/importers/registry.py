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
Importer = Callable[[Path, Path, int], ImportResult]
"""(source, destination, at most so many tasks or 0)"""


def import_from(format_name: str, source: Path, dest: Path, limit: int = 0) -> ImportResult:
    """Write task folders below ``dest``; TaskError for an unknown format or a missing source."""
    if format_name not in FORMATS:
        near = difflib.get_close_matches(format_name, FORMATS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"unknown format {format_name!r}; known: {', '.join(FORMATS)}{hint}")
    if not source.exists():
        raise TaskError(f"{source}: does not exist")
    module, _, name = FORMATS[format_name].partition(":")
    importer: Importer = getattr(importlib.import_module(module), name)
    return importer(source, dest, limit)
