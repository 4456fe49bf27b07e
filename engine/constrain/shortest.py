"""How a text that a grammar has begun can end: a short continuation, found by asking its matcher.

The matcher works on bytes and markers, so a question costs about a microsecond. The search goes
down greedily, follows what is forced, prefers what closes, and looks one symbol ahead; with a depth
it tries every way at each fork, to the end, and takes the best. Every answer has been accepted by
the matcher; none is proved to be the shortest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

END = 256
"""Symbols: 0-255 are bytes, 256 ends the text, then the markers."""
_FORCED_MARKER = re.compile(rb"\xff\[(\d+)\]")
_ORDER = b'}]"0123456789:tfn,aA-+._/ '
_RANK = {symbol: rank for rank, symbol in enumerate(_ORDER)}
_CLOSERS = np.packbits(
    np.isin(np.arange(256), np.frombuffer(b'}]",', np.uint8)).astype(np.uint8), bitorder="little"
)
_FEW = 40
"""So many symbols are all tried; of more, one of each kind."""


@dataclass(slots=True)
class Completer:
    """Asks ``matcher``, a llguidance matcher over symbols, and leaves it as it was.

    ``hints``: texts that satisfy a pattern whose way cannot be seen one byte ahead.
    """

    matcher: Any
    hints: tuple[bytes, ...] = ()

    def complete(self, limit: int, depth: int = 0, known: Sequence[int] = ()) -> list[int] | None:
        """Symbols from here to END, at most ``limit`` of them, or None when none were found.
        ``known``: an ending that may be in reach again a few symbols on; then it is taken."""
        return self._descend(limit, depth, known)

    def ends(self, symbols: Sequence[int]) -> bool:
        """Whether ``symbols``, END the last, are a way to the end from here."""
        body = list(symbols[:-1])
        if self.matcher.validate_tokens(body) < len(body):
            return False
        return self._ends_after(body)

    def _descend(self, limit: int, depth: int, known: Sequence[int] = ()) -> list[int] | None:
        matcher = self.matcher
        taken: list[int] = []
        seen: Counter[bytes] = Counter()
        try:
            while len(taken) < limit:
                if matcher.is_accepting():
                    return [*taken, END]
                if known and len(taken) + len(known) <= limit and self.ends(known):
                    return [*taken, *known]
                step = forced(matcher) or self._choose(limit - len(taken), depth, seen)
                consumed = matcher.try_consume_tokens(step)
                taken += step[:consumed]
                if not step or consumed < len(step):
                    return None
            return None
        finally:
            matcher.rollback(len(taken))

    def _choose(self, limit: int, depth: int, seen: Counter[bytes]) -> list[int]:
        """The next symbols where several ways are open; [] where none is. ``seen``: masks of the
        way so far, so that free text does not run in circles."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        is_text = len(allowed) > _FEW
        if is_text and 0x22 in allowed and not depth:
            return [0x22]
        if is_text and self.hints:
            hint = self._hint()
            if hint:
                return hint
        if is_text:
            seen[mask.tobytes()] += 1
        among = seen if is_text else None
        looked = [(self._look(symbol, mask, among), [symbol]) for symbol in _some(allowed)]
        looked.sort(key=lambda entry: entry[0])
        if self.hints and looked and looked[0][0][1]:  # one byte ahead, no way looks better
            hint = self._hint()
            if hint:
                return hint
        if not depth or len(looked) < 2:
            return looked[0][1] if looked else []
        best: list[int] = []
        for _, step in looked:
            if self.matcher.try_consume_tokens(step) < len(step):
                continue
            rest = self._descend(limit - len(step), depth - 1)
            self.matcher.rollback(len(step))
            if rest is not None and len(rest) + len(step) <= limit:
                best, limit = step, len(rest) + len(step) - 1
        return best

    def _look(
        self, symbol: int, mask: np.ndarray, seen: Counter[bytes] | None
    ) -> tuple[bool, bool, bool, int, int]:
        """What speaks against a symbol, the worst first: behind it the text is not complete,
        nothing has changed, nothing closes, it has been like that before (in free text, where
        ``seen`` is given); its rank."""
        matcher = self.matcher
        matcher.consume_token(symbol)
        accepting = matcher.is_accepting()
        after = mask if accepting else np.frombuffer(matcher.compute_bitmask(), np.uint8)
        matcher.rollback(1)
        # the half of a character or escape changes the mask and leads back to where it began
        is_half = symbol == 0x5C or 0x80 <= symbol < END
        # } and ] outside of strings, where the level above may allow the same as this one
        ends_level = symbol in (0x7D, 0x5D) and seen is None
        changed = accepting or ends_level or not (is_half or np.array_equal(after, mask))
        closes = accepting or bool((after[:32] & _CLOSERS).any())
        times = 0 if seen is None else seen[after.tobytes()]
        rank = _RANK.get(symbol, len(_RANK) + symbol)
        return (not accepting, not changed, not closes, times, rank)

    def _hint(self) -> list[int]:
        """The shortest rest of a hint behind which the string, or the text, can end."""
        rests = {hint[start:] for hint in self.hints for start in range(len(hint))}
        for rest in sorted(rests, key=lambda rest: (len(rest), rest)):
            symbols = list(rest)
            fits = self.matcher.validate_tokens([*symbols, 0x22])
            if fits > len(rest) or (fits == len(rest) and self._ends_after(symbols)):
                return symbols
        return []

    def _ends_after(self, symbols: list[int]) -> bool:
        if not symbols:
            return self.matcher.is_accepting()
        self.matcher.consume_tokens(symbols)
        accepting = self.matcher.is_accepting()
        self.matcher.rollback(len(symbols))
        return accepting


def forced(matcher: Any) -> list[int]:
    """Symbols that must come next."""
    data: bytes = matcher.compute_ff_bytes()
    if b"\xff" not in data:
        return list(data)
    symbols: list[int] = []
    start = 0
    for found in _FORCED_MARKER.finditer(data):
        symbols += data[start : found.start()]
        symbols.append(int(found[1]))
        start = found.end()
    return symbols + list(data[start:])


def _some(allowed: np.ndarray) -> Sequence[int]:
    """All of a few symbols; of many, those with a rank, markers, and the first of the others."""
    symbols: list[int] = [s for s in allowed.tolist() if s != END]
    if len(symbols) <= _FEW:
        return symbols
    ranked = [s for s in symbols if s in _RANK or s > END]
    others = [s for s in symbols if s not in _RANK and s < END]
    # bytes above 0x7f begin characters that need more of them
    return ranked[:_FEW] + others[:3] + [s for s in others if s >= 0x80][:2]
