"""What every tokenizer and renderer of this room speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """Text <-> token ids. Immutable, safe to share between threads."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in [0, vocab_size)."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides ids; equal digests tokenise equally."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. Never a special id, even where ``text`` spells a marker."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; ``decode(encode(text)) == text``, or its Unicode normal form where the
        vocabulary was trained on one. Special ids decode to their names.

        ChatError for an id outside the vocabulary.
        """
        ...

    def special_id(self, name: str) -> int:
        """Id of a marker such as "<|im_end|>"; ChatError when this vocabulary lacks it."""
        ...

    def has_special(self, name: str) -> bool: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallText:
    """A tool call as the model writes it: ``name_text`` is "functions.lookup:0"."""

    name_text: str
    arguments_text: str


@dataclass(frozen=True, slots=True)
class ToolDeclaration:
    """A tool as the model is told about it; ``parameters`` is the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})


@dataclass(frozen=True, slots=True)
class Media:
    """An image, or a chunk of four frames of a video, in the place where it stands in the text.

    ``num_tokens``: placeholder ids, one for each vector that the vision tower gives for it.
    """

    kind: Literal["image", "video"]
    num_tokens: int


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue."""

    role: Role
    text: str = ""
    calls: tuple[CallText, ...] = ()
    """Assistant only."""
    call_id: str = ""
    """Tool only: ``name_text`` of the call that this result answers."""
    reasoning: str = ""
    """Assistant only; kept in the history, because a history that is rewritten cannot be
    append-only."""
    name: str = ""
    """Who speaks where the role does not say: a user among several, the tool of a result."""
    parts: tuple[str | Media, ...] = ()
    """User and tool only, instead of ``text``: text and media in order."""
