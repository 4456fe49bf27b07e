"""A pure function of the answer, the end state and tests/data.json, which the agent never sees."""

from __future__ import annotations

from typing import Any


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``correctness`` in [0, 1] and the reasons for it."""
    states = {order["id"]: order["state"] for order in end_state.get("orders", [])}
    wanted = {**data["others"], **dict.fromkeys(data["refunded"], "refunded")}
    if states != wanted:
        return {"correctness": 0.0, "reasons": ["not exactly the damaged orders are refunded"]}
    if final_text.strip() != str(data["cents"]):
        return {"correctness": 0.5, "reasons": ["the refunds are right, the sum is not"]}
    return {"correctness": 1.0, "reasons": ["refunds and sum are right"]}
