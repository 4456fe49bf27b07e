"""Verifier of lookup_calc: a pure function of the final text and the end state.

Correct = the final text is the integer ``data["answer"]`` (spaces around it are ignored) and the
store still holds what it was set up with.
"""

from __future__ import annotations

import re
from typing import Any


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``."""
    answer = final_text.strip()
    if end_state.get("store") != data["store"]:
        return {"correctness": 0.0, "reasons": ["the store was changed"]}
    if not re.fullmatch(r"-?[0-9]{1,18}", answer):
        return {"correctness": 0.0, "reasons": ["the final text is not an integer"]}
    if int(answer) != data["answer"]:
        return {"correctness": 0.0, "reasons": ["the integer is wrong"]}
    return {"correctness": 1.0, "reasons": ["exact"]}
