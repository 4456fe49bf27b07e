"""StopFilter: holds back sampled tokens that may turn out to belong to a stop text.

The engine matches stop texts on the bytes of the sampled tokens and keeps the tokens up to and with
the match; clients must not see the match itself, nor the half of it that came with a delta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopFilter:
    """``push`` the tokens of deltas, ``finish`` once with what ended the step."""

    def __init__(self, stops: Sequence[str], token_bytes: Callable[[int], bytes]) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._bytes_of = token_bytes
        self._held: list[int] = []
        self._tail = b""
        """Bytes of ``_held``."""

    def push(self, ids: Sequence[int]) -> list[int]:
        """Ids that stand before any match, those held back before included."""
        if not self._stops:
            return list(ids)
        self._held += ids
        self._tail += b"".join(map(self._bytes_of, ids))
        return self._release(len(self._tail) - self._open_match())

    def finish(
        self, stop_text: str | None = None, *, include: bool = False
    ) -> tuple[list[int], bytes]:
        """(ids that are left, bytes behind them of the token in which the match begins).

        ``stop_text``: the stop that ended the step, if one did; ``include`` keeps it in the text.
        """
        if stop_text is None or not self._stops:
            ids, self._held, self._tail = self._held, [], b""
            return ids, b""
        stop = stop_text.encode()
        # the first match to be complete ends in the last token
        last = len(self._bytes_of(self._held[-1])) if self._held else 0
        at = self._tail.find(stop, max(0, len(self._tail) - last - len(stop) + 1))
        assert at >= 0, f"the step ended with {stop_text!r}, which its tokens do not spell"
        end = at + len(stop) if include else at
        tail = self._tail
        ids = self._release(end)
        done = len(tail) - len(self._tail)
        self._held, self._tail = [], b""
        return ids, tail[done:end]

    def _open_match(self) -> int:
        """Length of the longest end of the tail that is the beginning of a stop text."""
        # a match that is complete: the step has ended there, ``finish`` will say so
        complete = [self._tail.find(stop) for stop in self._stops]
        held = max((len(self._tail) - at for at in complete if at >= 0), default=0)
        for length in range(min(len(self._tail), max(map(len, self._stops))), held, -1):
            if any(stop.startswith(self._tail[-length:]) for stop in self._stops):
                return length
        return held

    def _release(self, num_bytes: int) -> list[int]:
        """The held ids that lie wholly in the first ``num_bytes``."""
        ids: list[int] = []
        done = 0
        for token_id in self._held:
            size = len(self._bytes_of(token_id))
            if done + size > num_bytes:
                break
            done += size
            ids.append(token_id)
        self._held, self._tail = self._held[len(ids) :], self._tail[done:]
        return ids
