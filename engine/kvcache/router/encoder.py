"""Sentence encoders of cold summaries: what they owe, the check at start, and a small one.

The dimension is always the encoder's own. A number of ours beside it is how summaries were once
concatenated to half their width without a word (facts/kv-attention.md 1.2).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.errors import RouterError
from engine.kvcache.router.terms import is_cjk, normalise, stems, terms


@runtime_checkable
class SummaryEncoder(Protocol):
    """A frozen text encoder. A vector is a function of its text alone."""

    @property
    def name(self) -> str:
        """Names the weights; vectors of encoders with different names are not comparable."""
        ...

    @property
    def dimension(self) -> int:
        """Numbers in the vector of one chunk."""
        ...

    def split(self, text: str) -> list[str]:
        """Chunks short enough to be encoded whole, at least one; nothing is cut off."""
        ...

    def encode(self, texts: Sequence[str]) -> Tensor:
        """fp32 [len(texts), dimension] on the CPU, rows of length 1."""
        ...


def check_encoder(encoder: SummaryEncoder, expected_dimension: int | None = None) -> None:
    """Try the encoder once. RouterError when it is not what it says or not what was expected."""
    if expected_dimension is not None and encoder.dimension != expected_dimension:
        raise RouterError(
            f"summary_dimension is {expected_dimension} but encoder {encoder.name!r} gives "
            f"{encoder.dimension} numbers a chunk; leave summary_dimension out, or use the encoder "
            "that the stored summaries and adapters were made with"
        )
    probes = ["one late fee", "a longer probe of the encoder, 两种文字"]
    vectors = encoder.encode(probes)
    expected = (len(probes), encoder.dimension)
    if tuple(vectors.shape) != expected or vectors.dtype != torch.float32:
        raise RouterError(
            f"encoder {encoder.name!r} gave {vectors.dtype} {tuple(vectors.shape)} for "
            f"{len(probes)} texts; expected float32 {expected} from its own dimension"
        )
    norms = vectors.norm(dim=1)
    if not torch.isfinite(norms).all() or (norms - 1).abs().max() > 1e-3:
        raise RouterError(
            f"encoder {encoder.name!r} gave vectors of lengths {norms.tolist()}; expected 1, "
            "normalise them"
        )


class HashingEncoder:
    """Signed feature hashing of words and character trigrams (Weinberger et al. 2009).

    Needs no weights and no download, knows no meaning: for tests, and for spelling variants when no
    trained encoder can be had.
    """

    def __init__(self, dimension: int = 512, chunk_chars: int = 1000) -> None:
        if dimension < 2 or chunk_chars < 1:
            raise RouterError(
                f"hashing encoder of dimension {dimension}, chunks of {chunk_chars} characters; "
                "expected at least 2 and 1"
            )
        self._dimension, self._chunk_chars = dimension, chunk_chars

    @property
    def name(self) -> str:
        return f"hashing-{self._dimension}"

    @property
    def dimension(self) -> int:
        return self._dimension

    def split(self, text: str) -> list[str]:
        size = self._chunk_chars
        return [text[i : i + size] for i in range(0, len(text), size)] or [""]

    def encode(self, texts: Sequence[str]) -> Tensor:
        rows = torch.zeros(len(texts), self._dimension)
        for row, text in zip(rows, texts, strict=True):
            for feature, count in self._features(text).items():
                digest = int.from_bytes(
                    hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little"
                )
                sign = 1.0 if digest >> 63 else -1.0
                row[digest % self._dimension] += sign * count**0.5
            norm = row.norm()
            if norm > 0:
                row /= norm
            else:  # no letters, or features that cancel out: still a unit vector, of nothing
                row[0] = 1.0
        return rows

    @staticmethod
    def _features(text: str) -> Counter[str]:
        features = Counter(terms(text))
        for word in stems(normalise(text)):
            if word.isalpha() and not is_cjk(word):
                padded = f"<{word}>"
                features.update(f"3:{padded[i : i + 3]}" for i in range(len(padded) - 2))
            elif is_cjk(word):
                features.update(f"1:{character}" for character in word)
        return features
