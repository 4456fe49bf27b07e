"""HermesTurn: deltas of a ChatML turn, whose calls are JSON objects inside <tool_call>.

A call is told as soon as its name is read, its arguments as they are written: from behind the key
``arguments`` to where that JSON value ends. The finder of engine.chat knows a call only when it is
complete, so this reader is its own; both agree on every turn that a renderer writes (tests).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum, auto

from engine.chat.base import Tokenizer
from engine.chat.hermes import CALL_CLOSE, CALL_OPEN, HermesFinder, read_call
from engine.server.turns.base import CallDelta, Characters, Delta, merge

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)',
    re.DOTALL,
)
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_QUOTE_OR_CLOSE = re.compile(f'"|{CALL_CLOSE}')
_HELD = ("\n" + CALL_OPEN, CALL_OPEN)
"""What content must not end with before it is told: a newline before a call is the format's."""


class _At(Enum):
    CONTENT = auto()
    CALL = auto()
    BETWEEN = auto()
    BROKEN = auto()
    DONE = auto()


class HermesTurn:
    """``calls`` False: where the vocabulary has no ids for the markers, they are ordinary text."""

    def __init__(self, tokenizer: Tokenizer, *, calls: bool, call_prefix: str = "call_") -> None:
        finder = HermesFinder(tokenizer)
        self._tokenizer = tokenizer
        self._ends, self._markers = finder.ends, finder.markers
        self._calls = calls
        self._call_prefix = call_prefix
        self._characters = Characters(tokenizer)
        self._at = _At.CONTENT
        self._rest = ""
        """Content that is held back, the open call's text, or what stands between calls."""
        self._scanned = 0
        self._in_string = False
        self._call: _CallText | None = None
        self._num_calls = 0
        self.error: str | None = None

    def push(self, ids: Sequence[int]) -> list[Delta]:
        deltas: list[Delta] = []
        for token_id in ids:
            if self._at is _At.DONE:
                break
            if token_id in self._ends:
                self._end(deltas)
            elif not self._tokenizer.is_special(token_id):
                self._text(self._characters.push([token_id]), deltas)
            else:
                self._text(self._characters.flush(), deltas)
                if token_id in self._markers:
                    self._marker(self._markers[token_id], deltas)
                else:
                    name = self._tokenizer.decode([token_id])
                    self._fail(f"{name} inside an assistant turn", deltas)
        return merge(deltas)

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        self._end(deltas)
        return merge(deltas)

    # -- text -----------------------------------------------------------------------------------

    def _text(self, text: str, deltas: list[Delta]) -> None:
        if not text or self._at in (_At.BROKEN, _At.DONE):
            return
        self._rest += text
        if self._markers or not self._calls:
            self._tell(text, deltas)
            return
        while self._at not in (_At.BROKEN, _At.DONE):
            marker = CALL_CLOSE if self._at is _At.CALL else CALL_OPEN
            at = self._find_close() if self._at is _At.CALL else self._rest.find(CALL_OPEN)
            if at < 0:
                break
            behind, self._rest = self._rest[at + len(marker) :], self._rest[:at]
            self._marker(marker, deltas)
            if self._at is not _At.BROKEN:
                self._rest = behind
        self._tell(text, deltas)

    def _tell(self, text: str, deltas: list[Delta]) -> None:
        """What can be said already of the part that is being read."""
        if self._at is _At.CONTENT:
            self._content(_held(self._rest) if self._calls else 0, deltas)
        elif self._at is _At.CALL:
            assert self._call is not None, "the call that is open"
            # in text mode a close marker may have begun at the end
            end = len(self._rest) if self._markers else self._rest_end()
            deltas += self._call.read(self._rest[:end])

    def _rest_end(self) -> int:
        held = len(CALL_CLOSE) - 1
        while held and not self._rest.endswith(CALL_CLOSE[:held]):
            held -= 1
        return len(self._rest) - held

    def _content(self, held: int, deltas: list[Delta]) -> None:
        told = self._rest[: len(self._rest) - held]
        self._rest = self._rest[len(told) :]
        if told:
            deltas.append(Delta(content=told))

    def _find_close(self) -> int:
        """Where the end marker stands outside of JSON strings, or -1."""
        while True:
            if self._in_string:
                inside = _IN_STRING.match(self._rest, self._scanned)
                assert inside is not None, "the pattern matches the empty string"
                self._scanned = inside.end()
                if self._rest[self._scanned : self._scanned + 1] != '"':
                    return -1
                self._scanned += 1
                self._in_string = False
            found = _QUOTE_OR_CLOSE.search(self._rest, self._scanned)
            if found is None:
                self._scanned = max(self._scanned, len(self._rest) - len(CALL_CLOSE) + 1)
                return -1
            if found[0] == CALL_CLOSE:
                return found.start()
            self._scanned, self._in_string = found.end(), True

    # -- markers --------------------------------------------------------------------------------

    def _marker(self, marker: str, deltas: list[Delta]) -> None:
        """``_rest`` is what came before it in the present part."""
        if self._at in (_At.BROKEN, _At.DONE):
            return
        if not self._calls:
            self._fail("the model called a tool where none may be called", deltas)
        elif marker == CALL_OPEN and self._at is _At.CONTENT:
            self._content(1 if self._rest.endswith("\n") else 0, deltas)
            self._open()
        elif marker == CALL_OPEN and self._at is _At.BETWEEN:
            if self._rest.strip():
                self._fail(f"text {self._rest.strip()[:40]!r} between two calls", deltas)
            else:
                self._open()
        elif marker == CALL_CLOSE and self._at is _At.CALL:
            self._close(deltas)
        else:
            self._fail(f"{marker} in the wrong place", deltas)

    def _open(self) -> None:
        self._call = _CallText(self._num_calls, f"{self._call_prefix}{self._num_calls}")
        self._at, self._rest, self._scanned, self._in_string = _At.CALL, "", 0, False

    def _close(self, deltas: list[Delta]) -> None:
        call, self._call = self._call, None
        assert call is not None, "the call that is open"
        deltas += call.read(self._rest)
        if not call.begun:
            deltas += call.whole(self._rest)
        if not call.begun:
            self._at = _At.CONTENT  # nothing of it is told
            self._rest = ""
            self._fail('a call that is not {"name": NAME, "arguments": {...}}', deltas)
            return
        self._num_calls += 1
        self._at, self._rest = _At.BETWEEN, ""

    def _end(self, deltas: list[Delta]) -> None:
        if self._at is not _At.DONE:
            self._text(self._characters.flush(), deltas)
        if self._at is _At.CONTENT:
            self._content(0, deltas)
        elif self._at is _At.CALL:
            assert self._call is not None, "the call that is open"
            deltas += self._call.read(self._rest)
            self.error = f"truncated call: the end of the turn where {CALL_CLOSE} was expected"
        self._at = _At.DONE

    def _fail(self, error: str, deltas: list[Delta]) -> None:
        if self._at is _At.CONTENT:
            self._content(0, deltas)
        elif self._at is _At.CALL:
            assert self._call is not None, "the call that is open"
            deltas += self._call.read(self._rest)
        if self.error is None:
            self.error = error
        self._at = _At.BROKEN


def _held(text: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a call."""
    for length in range(min(len(text), len(_HELD[0])), 0, -1):
        if any(whole.startswith(text[-length:]) for whole in _HELD):
            return length
    return 0


class _CallText:
    """The text of one call as it grows: name, then arguments, then what is of no interest."""

    def __init__(self, index: int, call_id: str) -> None:
        self._index, self._id = index, call_id
        self.begun = False
        self._at = 0
        """Characters that were read."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._ended = False

    def read(self, text: str) -> list[Delta]:
        """``text``: all of the call so far."""
        deltas: list[Delta] = []
        if not self.begun:
            head = _HEAD.match(text)
            name = _string(head[1]) if head else None
            if head is None or name is None:
                return deltas
            self.begun, self._at = True, head.end()
            deltas.append(Delta(call=CallDelta(self._index, self._id, name)))
        start = self._at
        while self._at < len(text) and not self._ended:
            self._step(text[self._at])
        if self._at > start:
            deltas.append(Delta(call=CallDelta(self._index, arguments=text[start : self._at])))
        return deltas

    def whole(self, text: str) -> list[Delta]:
        """A call with its keys in another order, now that it is complete."""
        found = read_call(text)
        if found is None:
            return []
        self.begun = True
        call = CallDelta(self._index, self._id, found.name_text, found.arguments_text)
        return [Delta(call=call)]

    def _step(self, character: str) -> None:
        """Take one character of the arguments, or see that they have ended before it."""
        if self._in_string:
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self._ended = not self._depth
        elif not self._depth and character in ",}] \t\r\n":
            self._ended = True
        else:
            self._at += 1
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self._ended = not self._depth


def _string(written: str) -> str | None:
    try:
        name = json.loads(written, strict=False)
    except ValueError:
        return None
    # an escape may spell half a surrogate pair, which JSON on the wire cannot carry
    return name.encode("utf-8", "replace").decode()
