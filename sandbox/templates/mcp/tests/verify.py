"""A pure function of the answer, the end state and tests/data.json, which the agent never sees."""

from __future__ import annotations

from typing import Any


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``correctness`` in [0, 1] and the reasons for it."""
    events = end_state.get("events", [])
    mine = [(e["day"], e["hour"]) for e in events if e["title"] == data["title"]]
    rest = sorted([e["day"], e["hour"]] for e in events if e["title"] != data["title"])
    if mine != [(data["day"], data["hour"])] or rest != data["kept"]:
        return {"correctness": 0.0, "reasons": ["the calendar is not as it should be"]}
    if final_text.strip() != str(data["hour"]):
        return {"correctness": 0.5, "reasons": ["the booking is right, the answer is not"]}
    return {"correctness": 1.0, "reasons": ["booking and answer are right"]}
