"""Find the tool calls of one assistant turn, by marker ids, as the tokens arrive.

Ids decide, not text: an argument that spells a marker in ordinary tokens is data. What the room
accepts beyond the canonical form, each seen in the wild (facts/sandboxes.md 3.1-3.3): no section
around the calls, a section that is not closed, white space between calls and around a call's id,
text after the section (dropped), the singular section markers (text mode). Everything else that
does not fit is an ``error``; nothing raises, because a bad turn is data. JSON is not looked at:
names and arguments are decoded by sandbox.calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.chat.base import CallText, Tokenizer
from engine.chat.markers import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    EOS,
    IM_END,
    SECTION_BEGIN,
    SECTION_END,
    SINGULAR_SECTION,
    SPECIAL_TOKENS,
    THINK_BEGIN,
    THINK_END,
)


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """A turn taken apart. No field ever holds a marker of the call structure."""

    text: str
    """Content outside calls and reasoning, white space untouched."""
    calls: tuple[CallText, ...]
    """Complete calls, in order; present also when ``error`` is set."""
    error: str | None
    """The first thing that does not fit, in one line; None = the turn is well formed."""
    reasoning: str = ""


class _At(Enum):
    """Where in the turn the next id falls."""

    CONTENT = auto()
    REASONING = auto()
    SECTION = auto()
    BARE = auto()  # after a call without a section
    NAME = auto()
    ARGUMENTS = auto()
    AFTER = auto()  # behind the section
    DONE = auto()  # behind the end of the turn


class CallFinder:
    """One turn, fed in pieces of any size: ``push`` ids, then ``finish``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._markers = {tokenizer.special_id(name): name for name in _STRUCTURE}
        self._at = _At.CONTENT
        self._in_section = False
        self._content: list[int] = []
        self._reasoning: list[int] = []
        self._between: list[int] = []
        self._name: list[int] = []
        self._arguments: list[int] = []
        self._calls: list[CallText] = []
        self._error: str | None = None

    def push(self, ids: Sequence[int]) -> list[CallText]:
        """Take the next ids; returns the calls that they complete."""
        before = len(self._calls)
        for token_id in ids:
            if self._at is _At.DONE:
                break
            marker = self._markers.get(token_id)
            if marker is not None:
                self._on_marker(marker, token_id)
            elif self._tokenizer.is_special(token_id):
                self._fail(f"marker {self._tokenizer.decode([token_id])} inside an assistant turn")
            else:
                self._on_text(token_id)
        return self._calls[before:]

    def finish(self) -> FoundTurn:
        """The whole turn; a call that is still open is an error, never a call."""
        self._close_call("end of the turn")
        self._check_between()
        decode = self._tokenizer.decode
        return FoundTurn(
            text=decode(self._content),
            calls=tuple(self._calls),
            error=self._error,
            reasoning=decode(self._reasoning),
        )

    def _on_text(self, token_id: int) -> None:
        match self._at:
            case _At.CONTENT:
                self._content.append(token_id)
            case _At.REASONING:
                self._reasoning.append(token_id)
            case _At.SECTION:
                self._between.append(token_id)
            case _At.NAME:
                self._name.append(token_id)
            case _At.ARGUMENTS:
                self._arguments.append(token_id)

    def _on_marker(self, marker: str, token_id: int) -> None:
        if marker in (THINK_BEGIN, THINK_END):
            self._on_think(marker, token_id)
        elif marker == SECTION_BEGIN:
            self._close_call(marker)
            self._at, self._in_section = _At.SECTION, True
        elif marker == SECTION_END:
            self._end_section()
        elif marker == CALL_BEGIN:
            self._close_call(marker)
            self._check_between()
            self._at = _At.NAME
        elif marker == ARGUMENT_BEGIN:
            if self._at is _At.NAME:
                self._at = _At.ARGUMENTS
            else:
                self._fail(f"{marker} that no call name precedes")
        elif marker == CALL_END:
            self._end_call()
        else:
            self._close_call(marker)
            self._at = _At.DONE

    def _on_think(self, marker: str, token_id: int) -> None:
        if self._at in (_At.NAME, _At.ARGUMENTS):
            # the tokenizer knows one spelling of <think>: code that mentions it is data
            self._on_text(token_id)
        elif marker == THINK_BEGIN and self._at is _At.CONTENT:
            self._at = _At.REASONING
        elif marker == THINK_END and self._at in (_At.CONTENT, _At.REASONING):
            # the header opened the block, or it was opened here
            if self._at is _At.CONTENT:
                self._reasoning += self._content
                self._content = []
            self._at = _At.CONTENT
        else:
            self._fail(f"{marker} in the wrong place")

    def _end_section(self) -> None:
        if not self._in_section and self._at is not _At.BARE:
            self._fail(f"{SECTION_END} without {SECTION_BEGIN}")
        self._close_call(SECTION_END)
        self._check_between()
        if not self._calls and self._error is None:
            self._fail("section without a call")
        self._at, self._in_section = _At.AFTER, False

    def _end_call(self) -> None:
        if self._at is not _At.ARGUMENTS:
            where = "without " + (ARGUMENT_BEGIN if self._at is _At.NAME else CALL_BEGIN)
            self._fail(f"{CALL_END} {where}")
        else:
            decode = self._tokenizer.decode
            self._calls.append(CallText(decode(self._name).strip(), decode(self._arguments)))
        self._leave_call()

    def _close_call(self, seen: str) -> None:
        """Something other than its end marker follows an open call: it is cut off, not a call."""
        if self._at in (_At.NAME, _At.ARGUMENTS):
            self._fail(f"truncated call: {seen} where {CALL_END} was expected")
            self._leave_call()

    def _leave_call(self) -> None:
        self._name, self._arguments = [], []
        if self._at in (_At.NAME, _At.ARGUMENTS):
            self._at = _At.SECTION if self._in_section else _At.BARE

    def _check_between(self) -> None:
        text = self._tokenizer.decode(self._between).strip()
        self._between = []
        if text:
            self._fail(f"text {text[:40]!r} between the calls of a section")

    def _fail(self, error: str) -> None:
        if self._error is None:
            self._error = error


_STRUCTURE = (
    SECTION_BEGIN,
    SECTION_END,
    CALL_BEGIN,
    ARGUMENT_BEGIN,
    CALL_END,
    THINK_BEGIN,
    THINK_END,
    IM_END,
    EOS,
)


def find_calls(ids: Sequence[int], tokenizer: Tokenizer) -> FoundTurn:
    """Take one assistant turn apart; ``ids`` are those sampled after the generation header."""
    finder = CallFinder(tokenizer)
    finder.push(ids)
    return finder.finish()


def find_calls_in_text(text: str, tokenizer: Tokenizer) -> FoundTurn:
    """Text mode, for engines that return no ids: every marker spelled in ``text`` is a marker.

    A marker inside an argument therefore cuts the call, which shows as an error.
    """
    return find_calls(ids_of_marked_text(text, tokenizer), tokenizer)


def ids_of_marked_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of trusted text in which markers are spelled out, such as a template's output."""
    ids: list[int] = []
    for piece in _SPELLED.split(text):
        marker = SINGULAR_SECTION.get(piece, piece)
        if marker in _ALL_MARKERS:
            ids.append(tokenizer.special_id(marker))
        else:
            ids += tokenizer.encode(piece)
    return ids


_ALL_MARKERS = frozenset(SPECIAL_TOKENS)
_SPELLED = re.compile(
    "(" + "|".join(re.escape(marker) for marker in (*SPECIAL_TOKENS, *SINGULAR_SECTION)) + ")"
)
