"""KimiTurn: deltas of a Kimi turn, over the finder's own reader.

Ids of markers decide. Calls keep the model's own id ("functions.NAME:INDEX"), because the next
prompt must repeat it (vllm#50768).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.chat.base import Tokenizer
from engine.chat.calls import CallFinder, Place
from engine.chat.markers import THINK_BEGIN, THINK_END
from engine.server.turns.base import CallDelta, Characters, Delta, merge

_NATIVE = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
NO_TOOLS = "the model called a tool where none may be called"


def name_of(call_id: str) -> str:
    """The tool's name in a call's id, "lookup" of "functions.lookup:0"; other texts as they are."""
    found = _NATIVE.fullmatch(call_id)
    return found[1] if found else call_id


class KimiTurn:
    """``thinking``: the header has opened a block of reasoning; without </think> a call ends it.

    A stray </think> (no block is open) is dropped: what was said before it stays content.
    """

    def __init__(self, tokenizer: Tokenizer, *, calls: bool, thinking: bool = False) -> None:
        self._reader = CallFinder(tokenizer).stream()
        self._calls = calls
        self._tokenizer = tokenizer
        self._characters = Characters(tokenizer)
        self._think_end = tokenizer.special_id(THINK_END)
        self._num_calls = 0
        self._name: list[int] = []
        self._error: str | None = None
        self._reader_error: str | None = None
        if thinking:
            self._reader.push([tokenizer.special_id(THINK_BEGIN)])

    @property
    def error(self) -> str | None:
        return self._error or self._reader_error

    def push(self, ids: Sequence[int]) -> list[Delta]:
        deltas: list[Delta] = []
        for token_id in ids:
            self._push(token_id, deltas)
        return merge(deltas)

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        self._say(self._reader.place, self._characters.flush(), deltas)
        self._reader_error = self._reader.finish().error
        return deltas

    def _push(self, token_id: int, deltas: list[Delta]) -> None:
        before = self._reader.place
        if token_id == self._think_end and before == "content":
            self._error = self._error or "</think> without <think>"
            return
        self._reader.push([token_id])
        after = self._reader.place
        if before == after:
            if before == "name":
                self._name.append(token_id)
            elif before != "nowhere":
                self._say(before, self._characters.push([token_id]), deltas)
            return
        # a marker; the reader is elsewhere now
        self._say(before, self._characters.flush(), deltas)
        if before == "name" and after == "arguments":
            self._begin_call(deltas)

    def _begin_call(self, deltas: list[Delta]) -> None:
        # as the finder does: white space around an id means nothing
        written = self._tokenizer.decode(self._name).strip()
        written = written.encode("utf-8", "replace").decode()
        self._name = []
        if not self._calls:
            self._error = self._error or NO_TOOLS
            return
        call_id = written or f"call_{self._num_calls}"
        call = CallDelta(self._num_calls, call_id, name_of(written))
        self._num_calls += 1
        deltas.append(Delta(call=call))

    def _say(self, place: Place, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if place == "content":
            deltas.append(Delta(content=text))
        elif place == "reasoning":
            deltas.append(Delta(reasoning=text))
        elif place == "arguments" and self._calls:
            deltas.append(Delta(call=CallDelta(self._num_calls - 1, arguments=text)))
