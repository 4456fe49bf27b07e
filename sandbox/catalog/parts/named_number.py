# --- named number: "12.34" or "North 12.34", for verify.py (catalog/parts/named_number.py) ---

import re
from decimal import Decimal


def read_named_number(
    final_text: str, pattern: re.Pattern[str], units: tuple[str, ...], named: bool
) -> tuple[str, Decimal] | str:
    """(name or "", number) of an answer, a unit behind it left out; else what is wrong with it:
    "name" (no name before the number) or "number" (it does not match ``pattern``)."""
    answer = final_text.strip()
    for unit in units:
        answer = answer.removesuffix(unit).rstrip()
    name, number = "", answer
    if named:
        parts = answer.rsplit(None, 1)
        if len(parts) != 2:
            return "name"
        name, number = parts[0].rstrip(" :：,，"), parts[1]
    if not pattern.fullmatch(number):
        return "number"
    return name, Decimal(number.replace("\u2212", "-"))
