"""What every vocabulary here is made of: bytes for each id, names for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.chat.pieces import Pieces
from engine.errors import ChatError


class BytesVocabulary:
    """The half of a ``Tokenizer`` that needs no text: ids to bytes, names to ids."""

    def __init__(self, pieces: Pieces, special_ids: Mapping[str, int], fingerprint: str) -> None:
        self._pieces = pieces
        self._special_ids = dict(special_ids)
        self._specials = frozenset(special_ids.values())
        self._fingerprint = fingerprint

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def special_tokens(self) -> dict[str, int]:
        """Name -> id of all markers."""
        return dict(self._special_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._pieces.decode(ids)

    def special_id(self, name: str) -> int:
        if name not in self._special_ids:
            known = [known for known in self._special_ids if "reserved" not in known]
            raise ChatError(
                f"special token {name!r} is not in this vocabulary; expected one of "
                f"{', '.join(known)}"
            )
        return self._special_ids[name]

    def has_special(self, name: str) -> bool:
        return name in self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._specials
