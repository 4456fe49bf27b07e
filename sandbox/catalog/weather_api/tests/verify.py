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
    # of catalog/parts/named_number.py, whose text follows this one in the bundle
    read = read_named_number(  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        final_text, CELSIUS, ("°C", "℃"), bool(data["name"])
    )
    if read == "name":
        return {"correctness": 0.0, "reasons": ["the final text is not a name and a number"]}
    if read == "number":
        return {"correctness": 0.0, "reasons": ["no temperature with one decimal, like 12.3"]}
    name, number = read
    if name != data["name"]:
        return {"correctness": 0.0, "reasons": ["the name is wrong"]}
    if number != Decimal(data["celsius"]):
        return {"correctness": 0.0, "reasons": ["the temperature is wrong"]}
    return {"correctness": 1.0, "reasons": ["exact"]}
