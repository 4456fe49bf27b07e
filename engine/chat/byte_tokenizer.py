"""Bytes, the Kimi markers, and whole words of one's own: a tokenizer that needs no file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

KIMI_MARKERS = (
    "[PAD]",
    "[BOS]",
    "[EOS]",
    "[EOT]",
    "[UNK]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
)
"""Names of facts 1.3; the ids differ from the released vocabulary, the meaning does not."""

NUM_BYTES = 256


class ByteTokenizer:
    """ids 0-255 are bytes, then KIMI_MARKERS, then ``words`` in the given order.

    A word is matched greedily, longest first, as a learned merge would be.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = tuple(dict.fromkeys(words))
        bad = [w for w in self.words if len(w.encode()) < 2 or w in KIMI_MARKERS]
        if bad:
            raise ValueError(
                f"chat word {bad[0]!r} is a single byte or a marker; expected longer ordinary text"
            )
        self._special = {name: NUM_BYTES + i for i, name in enumerate(KIMI_MARKERS)}
        first = NUM_BYTES + len(KIMI_MARKERS)
        self._word_ids = {word: first + i for i, word in enumerate(self.words)}
        self._text = {i: name for name, i in (self._special | self._word_ids).items()}
        ordered = sorted(self.words, key=lambda w: (-len(w), w))
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self.vocab_size = first + len(self.words)
        lines = "\n".join((*KIMI_MARKERS, *self.words))
        self.fingerprint = hashlib.sha256(lines.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        if self._pattern is None:
            return list(text.encode("utf-8", "surrogateescape"))
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids += text[start : match.start()].encode("utf-8", "surrogateescape")
            ids.append(self._word_ids[match.group()])
            start = match.end()
        ids += text[start:].encode("utf-8", "surrogateescape")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become lone surrogates, so that encode gives them back."""
        data = bytearray()
        for i in ids:
            if i < NUM_BYTES:
                data.append(i)
            else:
                data += self._text[int(i)].encode()
        return data.decode("utf-8", "surrogateescape")

    def special_id(self, name: str) -> int:
        return self._special[name]
