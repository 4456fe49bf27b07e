"""Verifier of pdf_report: a pure function of the final text and the end state.

Correct = the final text is the amount ``data["answer"]`` with two decimals (thousands separators
and spaces around it are fine) and the statement is what it was.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

AMOUNT = re.compile(r"[-\u2212]?(?:[0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})\.[0-9]{2}")


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``."""
    if end_state.get("statement_sha256") != data["statement_sha256"]:
        return {"correctness": 0.0, "reasons": ["the statement was changed"]}
    answer = final_text.strip()
    if not AMOUNT.fullmatch(answer):
        return {"correctness": 0.0, "reasons": ["the final text is not an amount like 1234.56"]}
    given = Decimal(answer.replace(",", "").replace("\u2212", "-"))
    if given != Decimal(data["answer"]):
        return {"correctness": 0.0, "reasons": ["the amount is wrong"]}
    return {"correctness": 1.0, "reasons": ["exact"]}
