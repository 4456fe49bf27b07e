"""Exact answers after normalisation: text, or an integer however it is written.

A verifier never guesses: what is not one answer is wrong, and "cannot determine" is not an answer.
"""

from __future__ import annotations

import re
import unicodedata

_SPACE = re.compile(r"\s+")
_PLAIN = re.compile(r"[+-]?[0-9]{1,18}(?:\.0*)?", re.ASCII)
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3}){1,5}(?:\.0*)?", re.ASCII)
_MINUS = str.maketrans({"\u2212": "-"})


def normalise(text: str) -> str:
    """NFKC (full-width digits become plain), case folded, runs of white space one space, no white
    space around, no full stops at the end."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _SPACE.sub(" ", folded).strip().rstrip(" .\u3002")


def integer(text: str) -> int | None:
    """The one integer ``text`` consists of: "42", "+1,000", "-7.0", full-width digits; None when
    there is anything else (words, two numbers, 1.5) or more than 18 digits."""
    plain = normalise(text).translate(_MINUS)
    if not (_PLAIN.fullmatch(plain) or _GROUPED.fullmatch(plain)):
        return None
    return int(plain.split(".")[0].replace(",", ""))


def exact_text(answer: str, expected: str) -> float:
    """C: 1.0 when both are the same after ``normalise`` and not empty, else 0.0."""
    found = normalise(answer)
    return float(found != "" and found == normalise(expected))


def exact_integer(answer: str, expected: int) -> float:
    """C: 1.0 when ``answer`` is the integer ``expected`` and nothing else, else 0.0."""
    return float(integer(answer) == expected)
