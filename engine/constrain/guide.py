"""Guide: one constrained step. What may come next, and a way to the end that always fits.

It holds two matchers of one grammar: over the model's tokens, for masks, and over bytes and
markers, for the search of an end (shortest.py). A token is taken only if an end is known behind it
that fits into the tokens left, so a step that began always ends with a complete text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import structlog

from engine.constrain.shortest import END, Completer
from engine.constrain.symbols import Symbols

log = structlog.get_logger(__name__)


class Guide:
    """Single-threaded. ``end_ids``: the tokens that may follow a complete text, and end it."""

    def __init__(
        self,
        tokens: Any,
        symbols: Any,
        book: Symbols,
        hints: tuple[bytes, ...],
        ends: tuple[int, ...],
        ending: list[int],
    ) -> None:
        """``tokens``, ``symbols``: fresh llguidance matchers, owned from now on; ``ending``: a
        known way from the start to its end, where one of ``ends`` stands."""
        self._tokens = tokens
        self._symbols = symbols
        self._book = book
        self._completer = Completer(symbols, hints)
        self.end_ids = frozenset(ends)
        self._end_id = ends[0]
        self._end_bits = book.bits(ends)
        self._other_ends = ~book.bits(set(book.vocabulary.eos_ids) - self.end_ids)
        self._ending = ending
        """Symbols that lead to the end from here."""
        self._is_lost = False
        self._path: list[int] | None = None
        """``_ending`` as tokens; None = not asked for yet."""

    @property
    def num_mask_bytes(self) -> int:
        return self._book.num_mask_bytes

    @property
    def shortest(self) -> int:
        """Tokens of the known ending, with the one that ends the step."""
        return len(self._way())

    def mask(self, left: int) -> np.ndarray:
        """uint8 [num_mask_bytes], little bit order: tokens that may come next when ``left`` >=
        ``shortest`` may still be sampled."""
        if left <= len(self._ending):
            # bytes bound tokens: only now is it worth counting
            way = self._way()
            if left <= len(way):
                return self.only(way[0])
        if self._is_lost:
            return self.only(self._way()[0])
        accepting = self._symbols.is_accepting()
        if accepting and self._tokens.is_stopped():
            return self._end_bits.copy()
        bits = self._book.padded(self._tokens.compute_bitmask()) & self._other_ends
        if accepting:
            bits |= self._end_bits
        return bits if bits.any() else self.only(self._way()[0])

    def only(self, token: int) -> np.ndarray:
        """The mask of one token."""
        return self._book.bits((token,))

    def advance(self, token: int, left: int) -> int:
        """Take ``token``, or the first one of the known ending where no end is in reach behind it
        with ``left`` tokens. Returns the token taken."""
        if token in self.end_ids:
            return token
        if self._is_lost or not self._takes(self._book.symbols_of(token), left):
            way = self._way()
            token = way[0]
            if token in self.end_ids:
                return token
            symbols = self._book.symbols_of(token)
            if not self._is_lost and self._symbols.try_consume_tokens(symbols) < len(symbols):
                self._lose(self._symbols)
            self._ending, self._path = self._ending[len(symbols) :], way[1:]
        if not self._is_lost and not self._tokens.consume_token(token):
            self._lose(self._tokens)
        return token

    def _lose(self, matcher: Any) -> None:
        """A matcher has given up (its limits of complexity): only the known ending is left."""
        self._is_lost = True
        log.warning("constraint_matcher_lost", error=matcher.get_error().split("\n")[0][:200])

    def _takes(self, symbols: list[int], left: int) -> bool:
        """Consume ``symbols`` if an end fits behind them."""
        matcher = self._symbols
        if matcher.try_consume_tokens(symbols) < len(symbols):
            self._lose(matcher)
            return False
        before = self._ending
        if before[: len(symbols)] == symbols:
            ending: list[int] | None = before[len(symbols) :]
        elif self._completer.ends(before):
            ending = before
        else:
            ending = self._completer.complete(self._book.most_symbols(left), known=before)
        if matcher.is_error():
            self._lose(matcher)
            return False
        if ending is before and left >= len(self._way()):
            return True
        if ending is not None and len(ending) <= left and self._book.has_all(ending):
            self._ending, self._path = ending, None
            return True
        path = None if ending is None else self._book.tokens_of(ending, self._end_id)
        if ending is not None and path is not None and len(path) <= left:
            self._ending, self._path = ending, path
            return True
        matcher.rollback(len(symbols))
        return False

    def _way(self) -> list[int]:
        if self._path is None:
            self._path = self._book.tokens_of(self._ending, self._end_id)
        assert self._path is not None, "an ending is kept only if tokens spell it"
        return self._path


assert END == 256
