"""Scrubber: takes secrets out of text and bytes, in every form they are likely to come back in.

Forms: as is; percent-encoded, wholly or in part, also twice; JSON and Python escapes; base64 and
base64url at each of the three byte offsets, as when "user:SECRET" was encoded; hexadecimal.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterable
from typing import Any

MARK = "[secret]"
MIN_SECRET_CHARS = 8
"""Shorter values occur in ordinary text; taking them out would destroy it."""


class Scrubber:
    """Immutable; ``with_values`` gives one that knows more."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        """ValueError for a value of less than MIN_SECRET_CHARS characters."""
        self._values = tuple(sorted(set(values), key=lambda value: (-len(value), value)))
        short = [value for value in self._values if len(value) < MIN_SECRET_CHARS]
        if short:
            raise ValueError(
                f"a secret of {len(short[0])} characters; expected at least {MIN_SECRET_CHARS}, "
                "shorter ones cannot be told from ordinary text"
            )
        plain = {form for value in self._values for form in _literal_forms(value)}
        # the longest first: a form may be part of another
        ordered = sorted(plain, key=lambda form: (-len(form), form))
        self._literal = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._escaped = [re.compile(_escaped_form(value)) for value in self._values]

    def with_values(self, values: Iterable[str]) -> Scrubber:
        """One that also takes out ``values``; values too short are left out, they are parts of
        what was injected (an "x-" prefix), not secrets."""
        extra = [value for value in values if len(value) >= MIN_SECRET_CHARS]
        return Scrubber([*self._values, *extra]) if extra else self

    def text(self, text: str) -> str:
        """``text`` with every form of every secret replaced by ``[secret]``."""
        if self._literal is None:
            return text
        text = self._literal.sub(MARK, text)
        if "%" in text or "\\" in text or "+" in text:
            for pattern in self._escaped:
                text = pattern.sub(MARK, text)
        return text

    def data(self, data: bytes) -> bytes:
        """The same for bytes; those that are not UTF-8 pass through unchanged."""
        if self._literal is None:
            return data
        text = data.decode("utf-8", "surrogateescape")
        clean = self.text(text)
        return data if clean == text else clean.encode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """The same for the strings (keys too) inside a JSON value."""
        if self._literal is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def _literal_forms(value: str) -> set[str]:
    raw = value.encode("utf-8", "surrogatepass")
    forms = {value, raw.hex(), raw.hex().upper()}
    for offset in range(3):
        # the characters whose bits all come from the secret, whatever stands before and after
        first = -(-offset * 8 // 6)
        last = (offset + len(raw)) * 8 // 6
        padded = b"\0" * offset + raw
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.add(encode(padded).decode()[first:last])
    whole = base64.b64encode(raw).decode()
    return forms | {whole, whole.rstrip("=")}


# at most four levels of escaping; unbounded repetition would make scanning quadratic, and what is
# scanned is written by others
_ESCAPE = r"\\{1,8}+"
_SHORT_ESCAPES = {
    '"': '"',
    "'": "'",
    "/": "/",
    "\n": "n",
    "\t": "t",
    "\r": "r",
    "\b": "b",
    "\f": "f",
}


def _escaped_form(value: str) -> str:
    """Pattern of a value in which every character may be escaped in its own way; a run of
    backslashes is one unit, since its length is all that can be told."""
    units = re.findall(r"\\+|[^\\]", value)
    return "".join(f"(?:{'|'.join(_escapes(unit))})" for unit in units)


def _escapes(unit: str) -> list[str]:
    """Patterns of one character: percent-encoded, JSON-escaped, itself."""
    percent = "".join(
        f"%(?:25){{0,4}}{_any_case(f'{byte:02X}')}"
        for byte in unit.encode("utf-8", "surrogatepass")
    )
    utf16 = unit.encode("utf-16-be", "surrogatepass")
    unicode = "".join(
        rf"{_ESCAPE}u{_any_case(utf16[at : at + 2].hex())}" for at in range(0, len(utf16), 2)
    )
    patterns = [percent, unicode]
    if unit[0] == "\\":
        return [*patterns, rf"\\{{{len(unit)},{8 * len(unit)}}}"]
    if unit in _SHORT_ESCAPES:
        patterns.append(_ESCAPE + _SHORT_ESCAPES[unit])
    if unit == " ":
        patterns.append(r"\+")
    patterns.append(re.escape(unit))
    return patterns


def _any_case(digits: str) -> str:
    return "".join(f"[{d.lower()}{d.upper()}]" if d.isalpha() else d for d in digits)


class ScrubFilter(logging.Filter):
    """Scrubs log records; for handlers, so that records of every logger pass it."""

    def __init__(self, scrubber: Scrubber) -> None:
        super().__init__()
        self.scrubber = scrubber

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.scrubber.text(record.getMessage()), None
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = self.scrubber.text(
                logging.Formatter().formatException(record.exc_info)
            )
            record.exc_info = None
        return True
