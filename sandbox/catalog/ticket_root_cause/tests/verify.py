"""Verifier of ticket_root_cause: a pure function of the final text.

Correct = the final text is the version ``data["version"]`` and the component
``data["component"]``, in this order.
"""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"([0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4})[\s,，;；:：]+(\S.{0,80})")


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``."""
    match = ANSWER.fullmatch(final_text.strip())
    if match is None:
        return {"correctness": 0.0, "reasons": ["the final text is not a version and a component"]}
    reasons = []
    if match[1] != data["version"]:
        reasons.append("the version is wrong")
    if match[2].strip().casefold() != data["component"].casefold():
        reasons.append("the component is wrong")
    return {"correctness": 0.0 if reasons else 1.0, "reasons": reasons or ["exact"]}
