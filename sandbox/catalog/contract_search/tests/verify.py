"""Verifier of contract_search: a pure function of the final text and the end state.

Correct = the final text names exactly the clauses and amounts of ``data["clauses"]``, one a line,
in any order, and the contract is what it was.
"""

from __future__ import annotations

import re
from typing import Any

ENTRY = re.compile(r"([0-9]{1,3}\.[0-9]{1,3})\s*[:：,，]?\s+([0-9]{1,12}|[0-9]{1,3}(?:,[0-9]{3})+)")
MAX_ENTRIES = 100


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``."""
    if end_state.get("contract_sha256") != data["contract_sha256"]:
        return {"correctness": 0.0, "reasons": ["the contract was changed"]}
    lines = [line.strip() for line in re.split(r"[\n;；]", final_text) if line.strip()]
    if not lines or len(lines) > MAX_ENTRIES:
        return {"correctness": 0.0, "reasons": ["the final text is no list of clauses"]}
    given: dict[str, int] = {}
    for line in lines:
        match = ENTRY.fullmatch(line)
        if match is None:
            return {"correctness": 0.0, "reasons": ["a line is not like: 7.2 15000"]}
        if match[1] in given:
            return {"correctness": 0.0, "reasons": [f"clause {match[1]} is named twice"]}
        given[match[1]] = int(match[2].replace(",", ""))
    wanted: dict[str, int] = data["clauses"]
    num_wrong = sum(given.get(number) != amount for number, amount in wanted.items())
    num_extra = len(set(given) - set(wanted))
    if num_wrong or num_extra:
        reason = f"{num_wrong} clauses missing or with a wrong amount, {num_extra} too many"
        return {"correctness": 0.0, "reasons": [reason]}
    return {"correctness": 1.0, "reasons": ["exact"]}
