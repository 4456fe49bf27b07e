"""KimiTokenizer: Kimi's byte-pair vocabulary from a rank file of the user.

The rank file is tiktoken's: a line is a token's bytes in base64, a space, its rank. Split pattern,
special tokens and the limits below are those of the released tokenizer (facts/kimi-facts.md 1.3).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from engine.chat.bytes_vocabulary import BytesVocabulary
from engine.chat.markers import kimi_special_ids
from engine.chat.pieces import Pieces, text_or_bytes
from engine.errors import ChatError

if TYPE_CHECKING:
    import tiktoken

RANK_FILE = "tiktoken.model"

_NOT_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_NOT_LETTER}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_NOT_LETTER}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Merges never cross these pieces of text."""

MAX_PIECE_CHARS = 400_000
"""Text is encoded in pieces of so many characters ..."""
MAX_RUN_CHARS = 25_000
"""... which are cut again inside longer runs of white space or of anything else."""
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN_CHARS + 1},}}|\S{{{MAX_RUN_CHARS + 1},}}")


class KimiTokenizer(BytesVocabulary):
    """Ranks 0..n-1 are ids 0..n-1, then come the 256 special tokens."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        import tiktoken

        _check_ranks(ranks)
        special_ids = kimi_special_ids(len(ranks))
        by_id = [token for _, token in sorted((rank, token) for token, rank in ranks.items())]
        digest = hashlib.sha256(SPLIT_PATTERN.encode())
        for token in by_id:
            digest.update(len(token).to_bytes(4, "little") + token)
        pieces = Pieces(by_id + [name.encode() for name in special_ids])
        super().__init__(pieces, special_ids, digest.hexdigest())
        # tiktoken is not told of special tokens, so no text can spell one
        self._merges: tiktoken.Encoding = tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )

    @classmethod
    def from_file(cls, path: str | Path) -> KimiTokenizer:
        """A rank file, or the folder that holds ``tiktoken.model``; ChatError if it is none."""
        file = Path(path)
        file = file / RANK_FILE if file.is_dir() else file
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ChatError(
                f"rank file {file} cannot be read ({error.strerror}); expected Kimi's "
                f"{RANK_FILE} or the folder that holds it"
            ) from error
        return cls(read_ranks(data, str(file)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in text_or_bytes(text):
            if isinstance(part, bytes):
                ids += [self._merges.encode_single_token(part[i : i + 1]) for i in range(len(part))]
                continue
            for piece in _pieces_of(part):
                ids += self._merges.encode_ordinary(piece)
        return ids


def read_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Parse a rank file; ChatError names ``where`` and the line that is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            hint = (
                "it is a Git LFS pointer, fetch the file itself"
                if b"git-lfs" in line
                else "expected TOKEN_IN_BASE64 RANK"
            )
            raise ChatError(f"{where} line {number} is {line[:60]!r}: {hint}") from error
    return ranks


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ChatError(
            f"a rank file has {len(ranks)} tokens, but their ranks are not 0 to "
            f"{len(ranks) - 1}, each once"
        )
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ChatError(
            f"a rank file lacks {len(missing)} of the 256 single bytes (first: {missing[0]}), so "
            "some text could not be encoded"
        )


def _pieces_of(text: str) -> Iterator[str]:
    """Cut as the released tokenizer does, so that long texts get its ids."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        cuts = [0]
        for run in _LONG_RUN.finditer(piece):
            cuts += range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)
        for begin, end in pairwise([*cuts, len(piece)]):
            yield piece[begin:end]
