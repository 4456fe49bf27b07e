"""Verifier of weather_api: a pure function of the final text.

Correct = the final text is the temperature ``data["celsius"]`` with one decimal, behind the
station's name ``data["name"]`` where one is asked for.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

CELSIUS = re.compile(r"[-+\u2212]?[0-9]{1,4}\.[0-9]")


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``."""
    answer = final_text.strip()
    for unit in ("°C", "℃"):
        answer = answer.removesuffix(unit).rstrip()
    name, number = "", answer
    if data["name"]:
        parts = answer.rsplit(None, 1)
        if len(parts) != 2:
            return {"correctness": 0.0, "reasons": ["the final text is not a name and a number"]}
        name, number = parts[0].rstrip(" :：,，"), parts[1]
    if not CELSIUS.fullmatch(number):
        return {"correctness": 0.0, "reasons": ["no temperature with one decimal, like 12.3"]}
    if name != data["name"]:
        return {"correctness": 0.0, "reasons": ["the name is wrong"]}
    if Decimal(number.replace("\u2212", "-")) != Decimal(data["celsius"]):
        return {"correctness": 0.0, "reasons": ["the temperature is wrong"]}
    return {"correctness": 1.0, "reasons": ["exact"]}
