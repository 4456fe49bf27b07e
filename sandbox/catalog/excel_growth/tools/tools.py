"""Tools of excel_growth: read ranges of an .xlsx workbook. Run in the box."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import openpyxl
from openpyxl.utils.cell import range_boundaries
from openpyxl.utils.exceptions import CellCoordinatesException

from sandbox.toolkit import ToolError, tool, workdir

FILE = "report.xlsx"
MAX_CELLS = 400


def setup(data: dict[str, Any]) -> None:
    """Write the workbook: ``data["xlsx"]`` is the file in base64."""
    (workdir() / FILE).write_bytes(base64.b64decode(data["xlsx"]))


@tool(effect="read", idempotent=True)
def list_sheets() -> str:
    """Sheets of report.xlsx with the range of their cells."""
    book = openpyxl.load_workbook(workdir() / FILE)
    return "\n".join(f"{sheet.title}: {sheet.dimensions}" for sheet in book.worksheets)


@tool(effect="read", idempotent=True)
def read_range(sheet: str, cells: str) -> str:
    """Values of a range such as A1:F12 of a sheet, a row a line; cells that hold a formula show
    the formula."""
    book = openpyxl.load_workbook(workdir() / FILE)
    if sheet not in book.sheetnames:
        raise ToolError(f"no sheet {sheet!r}; sheets: {', '.join(book.sheetnames)}")
    try:
        bounds = range_boundaries(cells.replace("$", "").strip().upper())
    except (ValueError, TypeError, CellCoordinatesException) as error:
        raise ToolError(f"{cells!r} is no range; write for example A1:F12") from error
    if None in bounds:
        raise ToolError(f"{cells!r} has no end; write for example A1:F12")
    left, top, right, bottom = (int(bound) for bound in bounds if bound is not None)
    if (right - left + 1) * (bottom - top + 1) > MAX_CELLS:
        raise ToolError(f"{cells} has more than {MAX_CELLS} cells; read it in parts")
    rows = book[sheet].iter_rows(top, bottom, left, right, values_only=True)
    lines = [
        f"{number}: " + " | ".join("" if cell is None else str(cell) for cell in row)
        for number, row in enumerate(rows, top)
    ]
    return "\n".join(lines)


def end_state() -> dict[str, Any]:
    """Fingerprint of the workbook: it must not change."""
    path = workdir() / FILE
    content = path.read_bytes() if path.is_file() else b""
    return {"workbook_sha256": hashlib.sha256(content).hexdigest()}
