"""Text from a box, made safe for terminals and line-based logs."""

from __future__ import annotations

import re

# C0 and C1 controls, DEL, and the characters that end or turn a line for a Unicode-aware viewer
_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]|\r(?!\n)"
)
_BREAK = re.compile("[\t\r\n]")


def printable(text: str, *, lines: bool = False, most: int | None = None) -> str:
    """``text`` with control characters written out (``\\x1b``); ``lines`` keeps tabs and line ends.

    Without ``lines`` the result is one line, so it cannot forge a log record; ``most`` cuts it.
    Lone surrogates (which no UTF-8 file can hold) are written out too.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    text = _CONTROL.sub(_written_out, text)
    if not lines:
        text = _BREAK.sub(_written_out, text)
    return text if most is None else text[:most]


def _written_out(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()
