"""HFTokenizer: byte-level BPE vocabularies of the model hub (GPT-2's kind: SmolLM2, Qwen, Llama 3).

The merging is done by the ``tokenizers`` library. What it leaves out and we need: text never
becomes a special id, bytes that are no text survive, and every id has exact bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.chat.bytes_vocabulary import BytesVocabulary
from engine.chat.gguf_vocab import read_metadata, tokenizer_json
from engine.chat.pieces import Pieces, text_or_bytes
from engine.errors import ChatError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
UNKNOWN = "\ufffd"
"""Stands for a character whose bytes a vocabulary lacks (SmolLM2 lacks 21 of 256)."""
_MARKER = re.compile(r"<[^\s].*>|\[[A-Z_]+\]", re.DOTALL)
"""Added tokens that are not flagged as special but are markers all the same: <tool_call>."""


class HFTokenizer(BytesVocabulary):
    """Ids of the model; markers are the added tokens."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        """``description`` is the content of a ``tokenizer.json``; ChatError for other kinds."""
        import tokenizers

        _check_kind(description)
        description = _as_plain(description)
        self._byte_ids = _byte_ids(description)
        self._missing = bytes(value for value in range(256) if value not in self._byte_ids)
        if self._missing and any(value in self._missing for value in UNKNOWN.encode()):
            raise ChatError(
                f"vocabulary lacks {len(self._missing)} of the 256 single bytes (first: "
                f"{self._missing[0]}), those of the replacement character among them"
            )
        text = json.dumps(description, sort_keys=True)
        super().__init__(
            _pieces(description),
            {t["content"]: t["id"] for t in description["added_tokens"] if t["special"]},
            hashlib.sha256(text.encode()).hexdigest(),
        )
        self._merges: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text)
        self._merges.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: str | Path) -> HFTokenizer:
        """Of a ``tokenizer.json``, the folder that holds one, or a GGUF file."""
        file = Path(path)
        if file.suffix == ".gguf":
            return cls(tokenizer_json(read_metadata(file)))
        file = file / TOKENIZER_FILE if file.is_dir() else file
        try:
            return cls(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            if isinstance(error, ChatError):
                raise
            raise ChatError(
                f"tokenizer {file} cannot be read ({error}); expected {TOKENIZER_FILE}, the folder "
                "that holds it, or a GGUF file"
            ) from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in text_or_bytes(text):
            if isinstance(part, str):
                ids += self._encode(self._known(part))
                continue
            for value in part:
                ids += [self._byte_ids[value]] if value in self._byte_ids else self._encode(UNKNOWN)
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._merges.encode(text, add_special_tokens=False).ids

    def _known(self, text: str) -> str:
        """The library drops bytes without a token silently; a visible sign is better."""
        if not self._missing or text.isascii():
            return text
        data = text.encode()
        if len(data.translate(None, self._missing)) == len(data):
            return text
        missing = frozenset(self._missing)
        return "".join(UNKNOWN if missing.intersection(c.encode()) else c for c in text)


def _check_kind(description: Mapping[str, Any]) -> None:
    model = description.get("model") or {}
    kind = (model.get("type", "BPE"), json.dumps(description.get("pre_tokenizer")))
    if kind[0] != "BPE" or '"ByteLevel"' not in kind[1]:
        raise ChatError(
            f"tokenizer is {kind[0]} with pre_tokenizer {kind[1][:80]}; expected BPE over bytes "
            "(ByteLevel), as SmolLM2, Qwen and Llama 3 have"
        )


def _as_plain(description: Mapping[str, Any]) -> dict[str, Any]:
    """Markers flagged as special, nothing added around the text, no truncation."""
    added = [
        {**token, "special": token["special"] or _MARKER.fullmatch(token["content"]) is not None}
        for token in description.get("added_tokens") or []
    ]
    model = dict(description["model"])
    if model.get("ignore_merges"):
        # such a model takes a word of its vocabulary as it is, a spelled marker too
        names = {token["content"] for token in added if token["special"]}
        model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in names}
    cut = {"truncation": None, "padding": None, "post_processor": None}
    return {**description, **cut, "added_tokens": added, "model": model}


def _byte_ids(description: Mapping[str, Any]) -> dict[int, int]:
    """Byte value -> id; vocabularies may lack bytes that were rare where they were trained."""
    vocabulary: dict[str, int] = description["model"]["vocab"]
    return {value: vocabulary[c] for c, value in _byte_values().items() if c in vocabulary}


def _pieces(description: Mapping[str, Any]) -> Pieces:
    """The bytes of every id."""
    vocabulary: dict[str, int] = description["model"]["vocab"]
    added: dict[str, int] = {t["content"]: t["id"] for t in description["added_tokens"]}
    size = max([*vocabulary.values(), *added.values()]) + 1
    pieces = [f"<|unused_{i}|>".encode() for i in range(size)]
    values = _byte_values()
    for token, token_id in vocabulary.items():
        if token not in added:
            pieces[token_id] = bytes(values[character] for character in token)
    for token, token_id in added.items():
        pieces[token_id] = token.encode()
    return Pieces(pieces)


@cache
def _byte_values() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letters = {chr(value): value for value in printable}
    return letters | {chr(256 + i): value for i, value in enumerate(others)}
