"""ByteTokenizer: bytes, Kimi's markers, and whole words that keep tiny dialogues short."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from engine.chat.bytes_vocabulary import BytesVocabulary
from engine.chat.markers import SINGULAR_SECTION, SPECIAL_TOKENS
from engine.chat.pieces import Pieces, to_bytes
from engine.errors import ChatError

NUM_BYTES = 256


class ByteTokenizer(BytesVocabulary):
    """Ids 0-255 are bytes, then ``SPECIAL_TOKENS``, then ``words`` in the given order.

    Text becomes its UTF-8 bytes; at each position the longest word that matches is one token.
    Bytes that are not UTF-8 decode to lone surrogates U+DC80-U+DCFF and encode back to the same
    bytes (PEP 383), so every id sequence survives decode and encode as bytes. Other lone
    surrogates are no text and encode as U+FFFD.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = tuple(words)
        _check_words(self.words)
        first_word = NUM_BYTES + len(SPECIAL_TOKENS)
        pieces = [bytes([value]) for value in range(NUM_BYTES)]
        pieces += [name.encode() for name in SPECIAL_TOKENS]
        spelled = [word.encode() for word in self.words]
        described = ["ByteTokenizer", list(SPECIAL_TOKENS), list(self.words)]
        super().__init__(
            Pieces(pieces + spelled),
            {name: NUM_BYTES + offset for offset, name in enumerate(SPECIAL_TOKENS)},
            hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        )
        self._word_ids = {word: first_word + index for index, word in enumerate(spelled)}
        # longest first: a regex alternation takes the first branch that matches
        by_length = sorted(spelled, key=len, reverse=True)
        self._word_pattern = (
            re.compile(b"|".join(re.escape(word) for word in by_length)) if spelled else None
        )

    def encode(self, text: str) -> list[int]:
        data = to_bytes(text)
        if self._word_pattern is None:
            return list(data)
        ids: list[int] = []
        done = 0
        for match in self._word_pattern.finditer(data):
            ids += data[done : match.start()]
            ids.append(self._word_ids[match.group()])
            done = match.end()
        ids += data[done:]
        return ids


def _check_words(words: tuple[str, ...]) -> None:
    markers = {*SPECIAL_TOKENS, *SINGULAR_SECTION}
    seen: set[str] = set()
    for word in words:
        if len(to_bytes(word)) < 2:
            raise ChatError(f"word {word!r} is shorter than two bytes; bytes are tokens already")
        if word in seen:
            raise ChatError(f"word {word!r} is given twice; each word is one token")
        if to_bytes(word).decode("utf-8", "replace") != word:
            raise ChatError(f"word {word!r} is not valid text; remove its lone surrogates")
        if any(marker in word for marker in markers):
            raise ChatError(f"word {word!r} spells a marker; markers are special tokens already")
        seen.add(word)
