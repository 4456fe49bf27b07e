"""Find the tool calls of one assistant turn, by marker ids, as the tokens arrive.

Ids decide, not text: an argument that spells a marker in ordinary tokens is data. What the room
accepts beyond the canonical form, each seen in the wild (facts/sandboxes.md 3.1-3.3): no section
around the calls, a section that is not closed, white space between calls and around a call's id,
text after the section (dropped), the singular section markers (text mode). At the first thing that
does not fit, reading stops: calls before it stand, the rest is ``unread``, nothing is guessed and
nothing raises, because a bad turn is data. JSON is not looked at: sandbox.calls decodes names and
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

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

_STRUCTURE = (
    *(SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END),
    *(THINK_BEGIN, THINK_END, IM_END, EOS),
)


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """A turn taken apart; markers never show in ``text`` or ``reasoning``."""

    text: str
    """Content outside calls and reasoning, white space untouched."""
    calls: tuple[CallText, ...]
    """Complete calls, in order, up to the first error."""
    error: str | None = None
    """The first thing that does not fit, in one line; None = the turn is well formed."""
    unread: str = ""
    """What was not read because of ``error``, markers by name."""
    reasoning: str = ""


class CallFinder:
    """Reads turns; stateless, safe to share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.markers = {tokenizer.special_id(name): name for name in _STRUCTURE}

    def find(self, ids: Sequence[int]) -> FoundTurn:
        """``ids`` sampled after one generation header, with or without the end marker."""
        reader = self.stream()
        reader.push(ids)
        return reader.finish()

    def stream(self) -> TurnReader:
        """A reader of one turn whose ids arrive in pieces."""
        return TurnReader(self)


class _At(Enum):
    """Where in the turn the next id falls."""

    CONTENT = auto()
    REASONING = auto()
    SECTION = auto()
    BARE = auto()  # after a call without a section
    NAME = auto()
    ARGUMENTS = auto()
    AFTER = auto()  # behind the section
    BROKEN = auto()
    DONE = auto()  # behind the end of the turn


Place = Literal["content", "reasoning", "name", "arguments", "nowhere"]
_PLACES: dict[_At, Place] = {
    _At.CONTENT: "content",
    _At.REASONING: "reasoning",
    _At.NAME: "name",
    _At.ARGUMENTS: "arguments",
}


class TurnReader:
    """One turn, fed in pieces of any size: ``push`` ids, then ``finish`` once."""

    def __init__(self, finder: CallFinder) -> None:
        self._tokenizer = finder.tokenizer
        self._markers = finder.markers
        self._at = _At.CONTENT
        self._in_section = False
        self._seen: list[int] = []
        self._open = 0  # where in _seen the call or the text between calls begins
        self._content: list[int] = []
        self._reasoning: list[int] = []
        self._name: list[int] = []
        self._arguments: list[int] = []
        self._calls: list[CallText] = []
        self._error: str | None = None
        self._unread_from = 0

    def push(self, ids: Sequence[int]) -> list[CallText]:
        """Take the next ids; returns the calls that they complete."""
        before = len(self._calls)
        for token_id in ids:
            if self._at is _At.DONE:
                break
            marker = self._markers.get(token_id)
            if marker in (IM_END, EOS):
                self._end_turn(marker)
                break
            self._seen.append(token_id)
            if self._at is _At.BROKEN:
                continue
            if marker is not None:
                self._on_marker(marker, token_id)
            elif self._tokenizer.is_special(token_id):
                self._fail(f"{self._tokenizer.decode([token_id])} inside an assistant turn")
            else:
                self._on_text(token_id)
        return self._calls[before:]

    @property
    def place(self) -> Place:
        """Where the next id of ordinary text would go; a server that streams pushes one id after
        the other and looks here."""
        return _PLACES.get(self._at, "nowhere")

    def finish(self) -> FoundTurn:
        """The whole turn; a call that is still open is an error, never a call."""
        if self._at is not _At.DONE:
            self._end_turn("the end of the turn")
        decode = self._tokenizer.decode
        return FoundTurn(
            text=decode(self._content),
            calls=tuple(self._calls),
            error=self._error,
            unread="" if self._error is None else decode(self._seen[self._unread_from :]),
            reasoning=decode(self._reasoning),
        )

    def _on_text(self, token_id: int) -> None:
        match self._at:
            case _At.CONTENT:
                self._content.append(token_id)
            case _At.REASONING:
                self._reasoning.append(token_id)
            case _At.NAME:
                self._name.append(token_id)
            case _At.ARGUMENTS:
                self._arguments.append(token_id)

    def _on_marker(self, marker: str, token_id: int) -> None:
        if marker in (THINK_BEGIN, THINK_END):
            self._on_think(marker, token_id)
        elif self._at in (_At.NAME, _At.ARGUMENTS):
            self._inside_call(marker)
        elif marker == SECTION_BEGIN and self._at is not _At.SECTION:
            self._at, self._in_section, self._open = _At.SECTION, True, len(self._seen)
        elif marker == CALL_BEGIN:
            if self._only_space_between():
                self._at, self._open = _At.NAME, len(self._seen) - 1
        elif marker == SECTION_END and self._calls and self._at in (_At.SECTION, _At.BARE):
            if self._only_space_between():
                self._at, self._in_section = _At.AFTER, False
        else:
            self._fail(f"{marker} where no call is open")

    def _inside_call(self, marker: str) -> None:
        if marker == ARGUMENT_BEGIN and self._at is _At.NAME:
            self._at = _At.ARGUMENTS
        elif marker == CALL_END and self._at is _At.ARGUMENTS:
            decode = self._tokenizer.decode
            self._calls.append(CallText(decode(self._name).strip(), decode(self._arguments)))
            self._name, self._arguments = [], []
            self._at = _At.SECTION if self._in_section else _At.BARE
            self._open = len(self._seen)
        else:
            self._fail_call(marker)

    def _on_think(self, marker: str, token_id: int) -> None:
        if self._at in (_At.NAME, _At.ARGUMENTS):
            # the tokenizer knows one spelling of <think>: code that mentions it is data
            self._on_text(token_id)
        elif marker == THINK_BEGIN and self._at is _At.CONTENT:
            self._at = _At.REASONING
        elif marker == THINK_END and self._at in (_At.CONTENT, _At.REASONING):
            if self._at is _At.CONTENT:
                # the generation header opened the block, so what came so far was reasoning
                self._reasoning += self._content
                self._content = []
            self._at = _At.CONTENT
        else:
            self._fail(f"{marker} in the wrong place")

    def _end_turn(self, seen: str) -> None:
        if self._at in (_At.NAME, _At.ARGUMENTS):
            self._fail_call(seen)
        elif self._at is _At.SECTION:
            clean = self._only_space_between(end=len(self._seen))
            if clean and not self._calls:
                self._fail("section without a call")
        self._at = _At.DONE

    def _only_space_between(self, end: int | None = None) -> bool:
        """Inside a section nothing but white space stands between calls; else it is an error."""
        if self._at is not _At.SECTION:
            return True
        between = self._seen[self._open : len(self._seen) - 1 if end is None else end]
        text = self._tokenizer.decode(between).strip()
        if text:
            self._fail(f"text {text[:40]!r} between the calls of a section", self._open)
        return not text

    def _fail_call(self, seen: str) -> None:
        missing = ARGUMENT_BEGIN if self._at is _At.NAME else CALL_END
        self._fail(f"truncated call: {seen} where {missing} was expected", self._open)

    def _fail(self, error: str, unread_from: int | None = None) -> None:
        self._error = error
        self._unread_from = len(self._seen) - 1 if unread_from is None else unread_from
        self._at = _At.BROKEN


def find_calls(ids: Sequence[int], tokenizer: Tokenizer) -> FoundTurn:
    """Take one assistant turn apart; see CallFinder."""
    return CallFinder(tokenizer).find(ids)


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
