"""Where a stop text ends among sampled tokens, byte by byte as they come."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidStateError


class StopTexts:
    """One step's stop texts. Bytes, not characters: a text may begin or end inside a token, and a
    character may be spread over several."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [(text, text.encode("utf-8", "surrogateescape")) for text in texts]
        self._keep = max(len(data) for _, data in self._texts) - 1
        self._tail = b""

    def push(self, data: bytes) -> str | None:
        """The bytes of the next token -> the stop text that ends first in them (the longest, if
        several end there), or None."""
        window = self._tail + data
        found: tuple[int, int, str] | None = None
        for text, wanted in self._texts:
            at = window.find(wanted)
            if at >= 0:
                here = (at + len(wanted), -len(wanted), text)
                found = here if found is None or here < found else found
        self._tail = window[-self._keep :] if self._keep else b""
        return None if found is None else found[2]


def check_stop_texts(texts: Sequence[str]) -> None:
    """InvalidStateError for an empty one: it would end every step at once."""
    if any(not text for text in texts):
        raise InvalidStateError(f"stop_texts {texts!r} hold an empty text; remove it")
