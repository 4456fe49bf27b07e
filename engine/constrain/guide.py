"""Guide: one constrained step. What may come next, and a way to the end that always fits.

It holds two matchers of one grammar: over the model's tokens, for masks, and over bytes and
markers, for the search of an end (shortest.py). A token is taken only if an end is known behind it
that fits into the tokens left, so a step that began always ends with a complete text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.constrain.shortest import END, Completer
from engine.constrain.symbols import Symbols


class Guide:
    """Single-threaded. ``end_ids``: the tokens that may follow a complete text, and end it."""

    def __init__(
        self,
        tokens: Any,
        symbols: Any,
        book: Symbols,
        hints: tuple[bytes, ...],
        end_ids: frozenset[int],
        ending: list[int],
    ) -> None:
        """``tokens``, ``symbols``: fresh llguidance matchers, owned from now on; ``ending``: a
        known way from the start to the end."""
        self._tokens = tokens
        self._symbols = symbols
        self._book = book
        self._completer = Completer(symbols, hints)
        self.end_ids = end_ids
        self._end_bits = book.bits(end_ids)
        self._ending = ending
        """Symbols that lead to the end from here."""
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
        accepting = self._symbols.is_accepting()
        if accepting and self._tokens.is_stopped():
            return self._end_bits.copy()
        bits = self._book.padded(self._tokens.compute_bitmask())
        return bits | self._end_bits if accepting else bits & ~self._end_bits

    def only(self, token: int) -> np.ndarray:
        """The mask of one token."""
        return self._book.bits((token,))

    def advance(self, token: int, left: int) -> int:
        """Take ``token``, or the first one of the known ending where no end is in reach behind it
        with ``left`` tokens. Returns the token taken."""
        if token in self.end_ids:
            return token
        if not self._takes(self._book.symbols_of(token), left):
            way = self._way()
            token = way[0]
            if token in self.end_ids:
                return token
            symbols = self._book.symbols_of(token)
            consumed = self._symbols.try_consume_tokens(symbols)
            assert consumed == len(symbols), "a checked ending"
            self._ending, self._path = self._ending[len(symbols) :], way[1:]
        consumed = self._tokens.consume_token(token)
        assert consumed, f"token {token} was allowed: {self._tokens.get_error()}"
        return token

    def _takes(self, symbols: list[int], left: int) -> bool:
        """Consume ``symbols`` if an end fits behind them."""
        matcher = self._symbols
        if matcher.try_consume_tokens(symbols) < len(symbols):
            raise AssertionError(f"symbols {symbols} were allowed: {matcher.get_error()}")
        before = self._ending
        if before[: len(symbols)] == symbols:
            ending: list[int] | None = before[len(symbols) :]
        elif matcher.validate_tokens(before[:-1]) == len(before) - 1 and self._ends(before[:-1]):
            ending = before
        else:
            ending = self._completer.complete(self._book.most_symbols(left))
        if ending is not None and (ending is before and left >= len(self._way())):
            return True
        if ending is not None and len(ending) <= left and self._book.has_all(ending):
            self._ending, self._path = ending, None
            return True
        path = None if ending is None else self._book.tokens_of(ending, self.end_ids)
        if ending is not None and path is not None and len(path) <= left:
            self._ending, self._path = ending, path
            return True
        matcher.rollback(len(symbols))
        return False

    def _ends(self, symbols: list[int]) -> bool:
        matcher = self._symbols
        if symbols:
            matcher.consume_tokens(symbols)
        accepting = matcher.is_accepting()
        if symbols:
            matcher.rollback(len(symbols))
        return accepting

    def _way(self) -> list[int]:
        if self._path is None:
            self._path = self._book.tokens_of(self._ending, self.end_ids)
        assert self._path is not None, "an ending is kept only if tokens spell it"
        return self._path


assert END == 256
