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
    answer = final_text.strip()
    for sign in ("%", "％"):
        answer = answer.removesuffix(sign).rstrip()
    name, number = "", answer
    if data["name"]:
        parts = answer.rsplit(None, 1)
        if len(parts) != 2:
            return {"correctness": 0.0, "reasons": ["the final text is not a name and a number"]}
        name, number = parts[0].rstrip(" :：,，"), parts[1]
    if not PERCENT.fullmatch(number):
        return {"correctness": 0.0, "reasons": ["no percentage with two decimals, like 12.34"]}
    if name != data["name"]:
        return {"correctness": 0.0, "reasons": ["the name is wrong"]}
    if Decimal(number.replace("\u2212", "-")) != Decimal(data["percent"]):
        return {"correctness": 0.0, "reasons": ["the percentage is wrong"]}
    return {"correctness": 1.0, "reasons": ["exact"]}
