"""D3's question: do two calls differ in one field only, and only trivially?"""

from __future__ import annotations

import re
import unicodedata
from difflib import SequenceMatcher
from typing import Any

from sandbox.loops.fingerprint import canonical
from sandbox.loops.verdict import JITTER_SIMILARITY

MAX_COMPARED = 256
"""Longer strings are only compared without case, space and punctuation."""
_NOISE = re.compile(r"[\W_]+")

SAME = ""
"""The two calls differ in no field."""


def jittered_field(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The one field in which two calls of a tool differ trivially, SAME, or None for calls that
    differ otherwise."""
    if one.keys() != other.keys():
        return None
    different = [key for key in one if canonical(one[key]) != canonical(other[key])]
    if not different:
        return SAME
    if len(different) > 1:
        return None
    field = different[0]
    return field if _is_trivial(one[field], other[field]) else None


def _is_trivial(one: Any, other: Any) -> bool:
    if _is_number(one) and _is_number(other):
        return True
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    first, second = _bare(one), _bare(other)
    if first == second or (first.isdecimal() and second.isdecimal()):
        return True
    if max(len(one), len(other)) > MAX_COMPARED:
        return False
    matcher = SequenceMatcher(None, one.casefold(), other.casefold(), autojunk=False)
    return matcher.quick_ratio() >= JITTER_SIMILARITY and matcher.ratio() >= JITTER_SIMILARITY


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bare(text: str) -> str:
    return _NOISE.sub("", unicodedata.normalize("NFKC", text)).casefold()
