"""Token ids <-> bytes for vocabularies whose tokens are byte strings.

Text and bytes meet as in PEP 383: bytes that are not UTF-8 decode to lone surrogates
U+DC80-U+DCFF and encode back to the same bytes. Other lone surrogates are no text and become
U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from engine.errors import ChatError

_SURROGATES = re.compile("([\ud800-\udfff]+)")


class Pieces:
    """The bytes of every token id; ``decode`` is the only place where ids become text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = tuple(pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._pieces):
            raise ChatError(
                f"token id {token_id} is outside the vocabulary; expected 0 to "
                f"{len(self._pieces) - 1}; do model and tokenizer belong together?"
            )
        return self._pieces[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self[token_id] for token_id in ids).decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """UTF-8 with PEP 383 escapes; a lone surrogate outside U+DC80-U+DCFF becomes U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)
        return text.encode("utf-8", "surrogateescape")


def text_or_bytes(text: str) -> Iterator[str | bytes]:
    """``text`` in order, cut into real text and the raw bytes that lone surrogates stand for."""
    if text.isascii() or _SURROGATES.search(text) is None:
        yield text
        return
    # escaped bytes that form UTF-8 together are text again
    data = to_bytes(text)
    for piece in _SURROGATES.split(data.decode("utf-8", "surrogateescape")):
        if _SURROGATES.fullmatch(piece):
            yield piece.encode("utf-8", "surrogateescape")
        elif piece:
            yield piece
