"""Column types that store any Python text and value on both databases.

PostgreSQL refuses NUL in text and both refuse lone surrogates; a policy that samples bytes
produces both. Text is escaped without loss, so comparisons in SQL work on the escaped form too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sqlalchemy import Dialect, Text
from sqlalchemy.types import TypeDecorator

_ESCAPE = "\ue000"  # private use: itself escaped, so the mapping is one to one
_UNSAFE = re.compile("[\x00\ue000\ud800-\udfff]")
_ESCAPED = re.compile("\ue000([0-9a-f]{4})")


def escape_text(text: str) -> str:
    """``text`` without NUL and surrogates; untouched when it has none of them."""
    return _UNSAFE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", text)


def unescape_text(text: str) -> str:
    """The inverse of ``escape_text``."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


class AnyText(TypeDecorator[str]):
    """``str`` of any content."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else escape_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else unescape_text(value)


class JsonText(TypeDecorator[Any]):
    """A JSON value as ASCII text: floats round-trip bit for bit, NaN and infinity included."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)
