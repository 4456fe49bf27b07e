"""Vocabulary: the bytes of every token id, for whatever reads text out of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.chat.base import Tokenizer
from engine.chat.hermes import END_OF_TEXT
from engine.chat.hermes import IM_END as CHATML_END
from engine.chat.markers import EOS, IM_END
from engine.errors import ChatError

_ENDS = (IM_END, EOS, CHATML_END, END_OF_TEXT)


@dataclass(frozen=True)
class Vocabulary:
    """``token_bytes`` by id, a marker's being its name; ``eos_ids`` end a turn; ``special_ids`` are
    markers, which no text becomes (and holes of the vocabulary). Picklable, immutable."""

    token_bytes: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """``eos_ids``: the end of a turn, and of a text, as far as the vocabulary has them."""
        size = tokenizer.vocab_size
        pieces = tuple(
            tokenizer.decode([i]).encode("utf-8", "surrogateescape") for i in range(size)
        )
        # an id that no token has decodes to this name (engine.chat.hf_tokenizer)
        holes = {i for i in range(size) if pieces[i] == f"<|unused_{i}|>".encode()}
        specials = {i for i in range(size) if tokenizer.is_special(i)} | holes
        ends = tuple(
            dict.fromkeys(tokenizer.special_id(e) for e in _ENDS if tokenizer.has_special(e))
        )
        if not ends:
            raise ChatError(
                f"vocabulary has none of {', '.join(dict.fromkeys(_ENDS))}: nothing ends a turn; "
                "give Vocabulary its eos_ids by hand"
            )
        return cls(pieces, ends, frozenset(specials))

    def __len__(self) -> int:
        return len(self.token_bytes)

    def bytes_of(self, token: int) -> bytes:
        """Of an id that a model may have beyond the vocabulary: nothing."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def text(self, token_ids: Sequence[int]) -> str:
        """A character cut off at either end becomes the replacement character."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Name -> id of the markers."""
        return {self.token_bytes[i].decode(): i for i in sorted(self.special_ids)}
