"""HermesFinder: the calls of one ChatML turn, each a JSON object inside <tool_call></tool_call>.

Where the vocabulary has ids for the two markers (Qwen), ids decide and a spelled marker is data.
Elsewhere text decides, and then a marker inside a JSON string is still data (vllm#45167). White
space between calls is accepted, text behind the last call is dropped. At the first thing that does
not fit, reading stops: calls before it stand, the rest is ``unread``, nothing is guessed and
nothing raises. A call's arguments are its text as written; sandbox.calls decodes them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from enum import Enum, auto

from engine.chat.base import CallText, Tokenizer
from engine.chat.calls import FoundTurn
from engine.chat.pieces import to_bytes

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

_WRITTEN = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)\}\s*',
    re.DOTALL,
)
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_QUOTE_OR_CLOSE = re.compile(f'"|{CALL_CLOSE}')


class HermesFinder:
    """Reads turns; stateless, safe to share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ends = {i for name in (IM_END, END_OF_TEXT) for i in _ids(tokenizer, name)}
        self.markers = {i: n for n in (CALL_OPEN, CALL_CLOSE) for i in _ids(tokenizer, n)}

    def find(self, ids: Sequence[int]) -> FoundTurn:
        """``ids`` sampled after one generation header, with or without the end marker."""
        reader = self.stream()
        reader.push(ids)
        return reader.finish()

    def stream(self) -> HermesReader:
        """A reader of one turn whose ids arrive in pieces."""
        return HermesReader(self)


class _At(Enum):
    """Where in the turn the next character falls."""

    CONTENT = auto()
    CALL = auto()
    BETWEEN = auto()  # behind a call
    BROKEN = auto()
    DONE = auto()


class HermesReader:
    """One turn, fed in pieces of any size: ``push`` ids, then ``finish`` once."""

    def __init__(self, finder: HermesFinder) -> None:
        self._tokenizer = finder.tokenizer
        self._ends = finder.ends
        self._markers = finder.markers
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._at = _At.CONTENT
        self._rest = ""
        """Text of the present part (content, call, space between calls), markers excluded."""
        self._scanned = 0
        """Characters of ``_rest`` in which no marker begins."""
        self._in_string = False
        """Whether a JSON string of the open call is open at ``_scanned``."""
        self._content = ""
        self._calls: list[CallText] = []
        self._error: str | None = None
        self._unread = ""

    def push(self, ids: Sequence[int]) -> list[CallText]:
        """Take the next ids; returns the calls that they complete."""
        before = len(self._calls)
        plain: list[int] = []
        for token_id in ids:
            if self._at is _At.DONE:
                break
            if token_id not in self._ends and not self._tokenizer.is_special(token_id):
                plain.append(token_id)
                continue
            self._on_text(self._text_of(plain, final=True))
            plain = []
            if token_id in self._ends:
                self._end()
            elif token_id in self._markers:
                self._on_marker(self._markers[token_id])
            else:
                name = self._tokenizer.decode([token_id])
                self._fail(f"{name} inside an assistant turn", self._open_call() + name)
        self._on_text(self._text_of(plain, final=False))
        return self._calls[before:]

    def finish(self) -> FoundTurn:
        """The whole turn; a call that is still open is an error, never a call."""
        if self._at is not _At.DONE:
            self._on_text(self._text_of([], final=True))
            self._end()
        return FoundTurn(self._content, tuple(self._calls), self._error, self._unread)

    def _text_of(self, ids: Sequence[int], final: bool) -> str:
        """A character may be spread over several ids; what ends with ``final`` ends there."""
        text = self._bytes.decode(to_bytes(self._tokenizer.decode(ids)), final)
        if final:
            self._bytes.reset()
        return text

    def _on_text(self, text: str) -> None:
        if self._at is _At.BROKEN:
            self._unread += text
        elif self._at is not _At.DONE:
            self._rest += text
            if not self._markers:
                self._read_spelled_markers()

    def _read_spelled_markers(self) -> None:
        while self._at not in (_At.BROKEN, _At.DONE):
            marker = CALL_CLOSE if self._at is _At.CALL else CALL_OPEN
            at = self._find_close() if self._at is _At.CALL else self._find_open()
            if at < 0:
                return
            behind = self._rest[at + len(marker) :]
            self._rest = self._rest[:at]
            self._on_marker(marker)
            if self._at is _At.BROKEN:
                self._unread += behind
            else:
                self._rest = behind

    def _find_open(self) -> int:
        at = self._rest.find(CALL_OPEN, self._scanned)
        self._scanned = max(0, len(self._rest) - len(CALL_OPEN) + 1)
        return at

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

    def _on_marker(self, marker: str) -> None:
        """``_rest`` is what came before it in the present part."""
        before = self._rest
        if self._at is _At.BROKEN:
            self._unread += marker
        elif marker == CALL_OPEN and self._at is _At.CONTENT:
            # the renderer writes a newline between content and calls
            self._content = before.removesuffix("\n")
            self._enter(_At.CALL)
        elif marker == CALL_OPEN and self._at is _At.BETWEEN:
            if before.strip():
                text = before.strip()[:40]
                self._fail(f"text {text!r} between two calls", before + marker)
            else:
                self._enter(_At.CALL)
        elif marker == CALL_CLOSE and self._at is _At.CALL:
            call = read_call(before)
            if call is None:
                self._fail(
                    'a call that is not {"name": NAME, "arguments": {...}}',
                    self._open_call() + marker,
                )
            else:
                self._calls.append(call)
                self._enter(_At.BETWEEN)
        else:
            self._fail(f"{marker} in the wrong place", self._open_call() + marker)

    def _enter(self, at: _At) -> None:
        self._at, self._rest, self._scanned, self._in_string = at, "", 0, False

    def _end(self) -> None:
        if self._at is _At.CONTENT:
            self._content = self._rest
        elif self._at is _At.CALL:
            self._fail(
                f"truncated call: the end of the turn where {CALL_CLOSE} was expected",
                self._open_call(),
            )
        self._at = _At.DONE

    def _open_call(self) -> str:
        return CALL_OPEN + self._rest if self._at is _At.CALL else ""

    def _fail(self, error: str, unread: str) -> None:
        if self._at is _At.BROKEN:
            self._unread += unread
            return
        if self._at is _At.CONTENT:
            self._content = self._rest
        self._error, self._unread = error, unread
        self._enter(_At.BROKEN)


def read_call(written: str) -> CallText | None:
    """What stands between the two markers; None where it is no call at all.

    Arguments that are no JSON are kept as written, because decoding them is not our business.
    """
    try:
        call = json.loads(written)
    except ValueError:
        call = None
    if isinstance(call, dict) and len(call) != 2:
        return _from_object(call)
    match = _WRITTEN.fullmatch(written)
    if match is None:
        return _from_object(call) if isinstance(call, dict) else None
    try:
        return CallText(json.loads(match[1], strict=False), match[2].strip())
    except ValueError:
        return None


def _from_object(call: dict[str, object]) -> CallText | None:
    """A call with its keys in another order, or with more of them."""
    name = call.get("name")
    if not isinstance(name, str):
        return None
    for key in ("arguments", "parameters"):
        if key in call:
            return CallText(name, json.dumps(call[key], ensure_ascii=False))
    return CallText(name, "")


def _ids(tokenizer: Tokenizer, name: str) -> list[int]:
    """The id of a marker, in a list, because a vocabulary may lack it."""
    return [tokenizer.special_id(name)] if tokenizer.has_special(name) else []
