"""What decoding a call gives: DecodedCall, or CallError with a line for the model to read."""

from __future__ import annotations

from collections.abc import Iterable
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

RESULT_TAG = "result:"
"""Prefix of the tags of repairs made to a tool's answer, which the policy did not write."""


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A call that may run. ``repairs``: one tag for each thing that was changed to understand it,
    ``kind`` or ``kind:where`` (``key_fuzzy:citty->city``); () = exactly as it should be."""

    tool: str
    arguments: dict[str, Any]
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that may not run. ``message`` is one short line without stack traces or host paths.

    ``details`` are for machines: the JSON reason (``truncated``, ``truncated_in_string``,
    ``non_finite``, ``duplicate_key``, ``args_not_object``, ``syntax``, ...) or one entry a key
    (``unknown:KEY``, ``missing:KEY``, ``ambiguous:KEY``, ``conflict:KEY``, ``invalid:KEY``).
    """

    code: CallErrorCode
    message: str
    tool: str | None = None
    """The registered tool, when the name was understood."""
    details: tuple[str, ...] = ()


def quote(text: str, limit: int = 64) -> str:
    """``text`` as the model wrote it, shortened, on one line, without control characters.

    Special-token markers are broken up so that an echoed name can never become a token.
    """
    return repr(plain(text, limit))


def plain(text: str, limit: int = 64) -> str:
    """Like ``quote``, without the quotes: for repair tags and details."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = shown.replace("<|", "<\\|")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def num_policy_repairs(tags: Iterable[str]) -> int:
    """How many of an observation's repair tags mend what the policy wrote; what the reward side
    may charge for. Repairs of a tool's answer are somebody else's spelling."""
    return sum(not tag.startswith(RESULT_TAG) for tag in tags)
