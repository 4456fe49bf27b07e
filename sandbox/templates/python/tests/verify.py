"""A pure function of the answer, the end state and tests/data.json, which the agent never sees."""

from __future__ import annotations

from typing import Any


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``correctness`` in [0, 1] and the reasons for it."""
    if end_state.get("items") != data["items"]:
        return {"correctness": 0.0, "reasons": ["the prices are not as they should be"]}
    if final_text.strip() != str(data["changed"]):
        return {"correctness": 0.5, "reasons": ["the prices are right, the number is not"]}
    return {"correctness": 1.0, "reasons": ["prices and number are right"]}
