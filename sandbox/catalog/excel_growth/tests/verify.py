"""Verifier of excel_growth: a pure function of the final text and the end state.

Correct = the final text is the percentage ``data["percent"]`` with two decimals, behind the name
``data["name"]`` where one is asked for, and the workbook is what it was.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

PERCENT = re.compile(r"[-+\u2212]?[0-9]{1,9}\.[0-9]{2}")


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``."""
    if end_state.get("workbook_sha256") != data["workbook_sha256"]:
        return {"correctness": 0.0, "reasons": ["the workbook was changed"]}
    # of catalog/parts/named_number.py, whose text follows this one in the bundle
    read = read_named_number(  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        final_text, PERCENT, ("%", "％"), bool(data["name"])
    )
    if read == "name":
        return {"correctness": 0.0, "reasons": ["the final text is not a name and a number"]}
    if read == "number":
        return {"correctness": 0.0, "reasons": ["no percentage with two decimals, like 12.34"]}
    name, number = read
    if name != data["name"]:
        return {"correctness": 0.0, "reasons": ["the name is wrong"]}
    if number != Decimal(data["percent"]):
        return {"correctness": 0.0, "reasons": ["the percentage is wrong"]}
    return {"correctness": 1.0, "reasons": ["exact"]}
