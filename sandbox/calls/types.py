"""What decoding a call gives: DecodedCall, or CallError with a line for the model to read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class CallErrorCode(StrEnum):
    """Short class name; becomes ``Observation.error``."""

    UNPARSABLE = "unparsable"
    """No tool name could be read at all (empty, huge or not printable)."""
    UNKNOWN_TOOL = "unknown_tool"
    FORBIDDEN_TOOL = "forbidden_tool"
    BAD_JSON = "bad_json"
    BAD_ARGUMENTS = "bad_arguments"


ILLEGAL_CODES = frozenset({CallErrorCode.UNKNOWN_TOOL, CallErrorCode.FORBIDDEN_TOOL})
"""Calls of a tool that does not exist or may not be used."""


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A call that may run. ``repairs``: what was changed to understand it (none when strict)."""

    tool: str
    arguments: dict[str, Any]
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that may not run. ``message`` is one short line without stack traces or host paths."""

    code: CallErrorCode
    message: str
    tool: str | None = None
    """The registered tool, when the name was understood."""


def quote(text: str, limit: int = 64) -> str:
    """``text`` as the model wrote it, shortened, on one line, without control characters.

    Special-token markers are broken up so that an echoed name can never become a token.
    """
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = shown.replace("<|", "<\\|")
    return repr("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown))
