"""What readers of turns give, and what it adds up to."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.chat.base import Tokenizer
from engine.chat.pieces import to_bytes


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call ``index``; ``id`` and ``name`` come once, before or with the first arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What follows what was said before; exactly one field says something."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class TurnDeltas(Protocol):
    """Reads one turn in pieces of any size."""

    @property
    def error(self) -> str | None:
        """The first thing in the turn that does not fit, in one line."""
        ...

    def push(self, ids: Sequence[int]) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back; once, at the end."""
        ...


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Turn:
    """A turn so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list[Call])

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        call = delta.call
        if call is None:
            return
        if call.index == len(self.calls):
            assert call.id is not None and call.name is not None, "a call begins with its name"
            self.calls.append(Call(call.id, call.name))
        self.calls[call.index].arguments += call.arguments


def fold(deltas: Iterable[Delta]) -> Turn:
    """The sum of deltas."""
    turn = Turn()
    for delta in deltas:
        turn.add(delta)
    return turn


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The same in as few deltas as say it in the same order."""
    merged: list[Delta] = []
    for delta in deltas:
        both = _joined(merged[-1], delta) if merged else None
        if both is None:
            merged.append(delta)
        else:
            merged[-1] = both
    return merged


def _joined(first: Delta, second: Delta) -> Delta | None:
    """None where two deltas cannot be one."""
    head, more = first.call, second.call
    if head is None and more is None:
        both = Delta(first.content + second.content, first.reasoning + second.reasoning)
        return None if both.content and both.reasoning else both
    if head is None or more is None or head.index != more.index:
        return None
    arguments = head.arguments + more.arguments
    return Delta(call=CallDelta(head.index, head.id, head.name, arguments))


class Characters:
    """Ids of ordinary text -> text. A character may be spread over several ids; bytes that are no
    UTF-8 become U+FFFD, because JSON cannot carry them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(to_bytes(self._tokenizer.decode(ids)))

    def flush(self) -> str:
        """What is left of a character that did not end; the next text begins afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
