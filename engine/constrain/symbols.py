"""Symbols: a vocabulary seen as bytes and markers, and what llguidance needs to know of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from engine.chat.vocabulary import Vocabulary
from engine.constrain.shortest import END

_MAX_TOKEN_BYTES = 48
"""Longer tokens are not used to spell an ending."""


class Symbols:
    """Immutable but for caches that any thread may fill."""

    def __init__(self, vocabulary: Vocabulary, model_vocab_size: int) -> None:
        self.vocabulary = vocabulary
        self.model_vocab_size = model_vocab_size
        self.num_mask_bytes = -(-model_vocab_size // 8)
        self._markers = {t: END + 1 + i for i, t in enumerate(sorted(vocabulary.special_ids))}
        self._ids = {symbol: token for token, symbol in self._markers.items()}

    # -- masks ----------------------------------------------------------------------------------

    def bits(self, tokens: Iterable[int]) -> np.ndarray:
        """uint8 [num_mask_bytes]"""
        bits = np.zeros(self.num_mask_bytes, np.uint8)
        for token in tokens:
            bits[token >> 3] |= 1 << (token & 7)
        return bits

    def padded(self, mask: bytes) -> np.ndarray:
        """llguidance's mask, for a model that may have more ids than the vocabulary."""
        bits = np.zeros(self.num_mask_bytes, np.uint8)
        given = np.frombuffer(mask, np.uint8)[: self.num_mask_bytes]
        bits[: len(given)] = given
        return bits & self._known

    @cached_property
    def _known(self) -> np.ndarray:
        # its masks are whole words of 32 bits
        return np.packbits(
            np.arange(self.num_mask_bytes * 8) < len(self.vocabulary), bitorder="little"
        )

    # -- spelling -------------------------------------------------------------------------------

    def symbols_of(self, token: int) -> list[int]:
        marker = self._markers.get(token)
        return list(self.vocabulary.token_bytes[token]) if marker is None else [marker]

    def has_all(self, symbols: Sequence[int]) -> bool:
        """Whether each symbol is a token, so that their number bounds the tokens needed."""
        return not self._missing or self._missing.isdisjoint(symbols)

    def most_symbols(self, num_tokens: int) -> int:
        """How long an ending that fits into ``num_tokens`` may be worth looking for."""
        return min(8 * num_tokens, num_tokens + 4096)

    @cached_property
    def _missing(self) -> frozenset[int]:
        return frozenset(value for value in range(256) if bytes([value]) not in self._by_bytes)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        vocabulary = self.vocabulary
        return {
            piece: token
            for token, piece in enumerate(vocabulary.token_bytes)
            if piece and token not in vocabulary.special_ids and len(piece) <= _MAX_TOKEN_BYTES
        }

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=1)

    def tokens_of(self, symbols: Sequence[int], end_id: int) -> list[int] | None:
        """The fewest tokens that spell ``symbols``, ``end_id`` for END; None where bytes have no
        token."""
        tokens: list[int] = []
        text = bytearray()
        for symbol in symbols:
            if symbol < END:
                text.append(symbol)
                continue
            spelled = self._spelled(bytes(text))
            if spelled is None:
                return None
            tokens += spelled
            text.clear()
            tokens.append(end_id if symbol == END else self._ids[symbol])
        rest = self._spelled(bytes(text))
        return None if rest is None else tokens + rest

    def _spelled(self, text: bytes) -> list[int] | None:
        """Shortest path over the positions of ``text``."""
        best: list[tuple[int, int]] = [(0, -1)]  # tokens to get here, the last of them
        for end in range(1, len(text) + 1):
            fewest, last = len(text) + 1, -1
            for start in range(max(0, end - self._longest), end):
                token = self._by_bytes.get(text[start:end])
                if token is not None and best[start][0] + 1 < fewest:
                    fewest, last = best[start][0] + 1, token
            best.append((fewest, last))
        if best[-1][0] > len(text):
            return None
        tokens: list[int] = []
        end = len(text)
        while end:
            tokens.append(best[end][1])
            end -= len(self.vocabulary.token_bytes[best[end][1]])
        return tokens[::-1]

    # -- llguidance -----------------------------------------------------------------------------

    @cached_property
    def token_trie(self) -> Any:
        """LLTokenizer over the model's tokens."""
        vocabulary = self.vocabulary
        return _lltokenizer(
            list(vocabulary.token_bytes), sorted(vocabulary.special_ids), vocabulary.eos_ids[0]
        )

    @cached_property
    def symbol_trie(self) -> Any:
        """LLTokenizer over bytes, the end and the markers."""
        names = [self.vocabulary.token_bytes[token] for token in self._markers]
        pieces = [bytes([value]) for value in range(256)] + [b"<|end of text|>", *names]
        return _lltokenizer(pieces, list(range(END, len(pieces))), END)


class _Wrapper:
    """What llguidance asks of a tokenizer. It looks at how forced text would be merged, to leave
    other ways open; any way of spelling will do, so it is the longest token at each place."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos

        skip = set(special)
        self._by_bytes = {t: i for i, t in enumerate(tokens) if t and i not in skip}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                token = self._by_bytes.get(data[start:end])
                if token is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                start += 1  # a byte without a token
        return ids


def _lltokenizer(tokens: list[bytes], special: list[int], eos: int) -> Any:
    import llguidance

    wrapper = llguidance.TokenizerWrapper(_Wrapper(tokens, special, eos))
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=[eos])
