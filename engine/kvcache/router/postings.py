"""BM25 over a set of blocks that changes all the time: blocks come and go in O(their terms).

Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", equation 3.15, with the idf
of Lucene, log(1 + (N - n + .5) / (n + .5)), which is never negative. The libraries for it (bm25s,
rank-bm25) index a corpus once; ours loses and gains blocks at every eviction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Match:
    score: float = 0.0
    """BM25 score over what a block with all of the question's terms could reach: 0 .. 1."""
    coverage: float = 0.0
    """Share of the question's idf weight that the block holds: 0 .. 1."""
    terms: list[str] = field(default_factory=list)


class Postings:
    """Term -> blocks. Not thread-safe."""

    def __init__(self, k1: float, b: float) -> None:
        self._k1, self._b = k1, b
        self._postings: dict[str, dict[int, int]] = {}
        self._terms: dict[int, Counter[str]] = {}
        self._lengths: dict[int, int] = {}
        self._total_length = 0

    def __len__(self) -> int:
        return len(self._terms)

    def add(self, block_id: int, terms: Sequence[str], extra: Sequence[str] = ()) -> None:
        """Index a block. ``extra`` terms (clusters) count once and do not lengthen it."""
        assert block_id not in self._terms, f"block {block_id} is indexed already"
        counts = Counter(terms)
        counts.update(dict.fromkeys(extra, 1))
        self._terms[block_id] = counts
        self._lengths[block_id] = len(terms)
        self._total_length += len(terms)
        for term, count in counts.items():
            self._postings.setdefault(term, {})[block_id] = count

    def remove(self, block_id: int) -> None:
        self._total_length -= self._lengths.pop(block_id)
        for term in self._terms.pop(block_id):
            blocks = self._postings[term]
            del blocks[block_id]
            if not blocks:
                del self._postings[term]

    def idf(self, term: str) -> float:
        holders = len(self._postings.get(term, ()))
        return math.log(1 + (len(self._terms) - holders + 0.5) / (holders + 0.5))

    def search(self, weights: Mapping[str, float]) -> dict[int, Match]:
        """Blocks that hold at least one term; weights of terms are positive."""
        idfs = {term: weight * self.idf(term) for term, weight in weights.items()}
        total = sum(idfs.values())
        mean_length = self._total_length / max(1, len(self._terms)) or 1.0
        matches: dict[int, Match] = {}
        for term, idf in idfs.items():
            for block_id, count in self._postings.get(term, {}).items():
                length = self._lengths[block_id] / mean_length
                saturation = count / (count + self._k1 * (1 - self._b + self._b * length))
                match = matches.setdefault(block_id, Match())
                match.score += idf * saturation / total
                match.coverage += idf / total
                match.terms.append(term)
        return matches
