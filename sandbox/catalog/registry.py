"""Shipped task families by name. Listing names imports no family."""

from __future__ import annotations

import difflib
import importlib

from sandbox.catalog.base import Family
from sandbox.errors import TaskError

FAMILIES: dict[str, str] = {
    "excel_growth": "sandbox.catalog.excel_growth.family:ExcelGrowth",
    "lookup_calc": "sandbox.catalog.lookup_calc.family:LookupCalc",
    "contract_search": "sandbox.catalog.contract_search.family:ContractSearch",
    "python_debug": "sandbox.catalog.python_debug.family:PythonDebug",
    "ticket_root_cause": "sandbox.catalog.ticket_root_cause.family:TicketRootCause",
    "weather_api": "sandbox.catalog.weather_api.family:WeatherApi",
    "pdf_report": "sandbox.catalog.pdf_report.family:PdfReport",
}
"""Name -> ``module:class``; the class is built without arguments by ``get_family``."""


def list_families() -> list[str]:
    """Names, sorted."""
    return sorted(FAMILIES)


def list_tasks() -> list[str]:
    """``family/task_type`` of every shipped family, sorted."""
    return sorted(f"{name}/{kind}" for name in FAMILIES for kind in get_family(name).task_types)


def get_family(name: str) -> Family:
    """The family with its default parameters; TaskError lists the known and the nearest name."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"unknown task family {name!r}; known: {', '.join(list_families())}{hint}")
    module, _, attribute = FAMILIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()
