"""The router itself: postings first, summaries of all cold blocks when postings are not sure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.errors import RouterError
from engine.kvcache.router.config import RouterConfig
from engine.kvcache.router.encoder import SummaryEncoder, check_encoder
from engine.kvcache.router.postings import Match, Postings
from engine.kvcache.router.synonyms import SynonymTable
from engine.kvcache.router.terms import cjk_share, terms

_CLEAR_COSINE = 0.3
"""When even the best summary is less like the question, none may count as if it were clear."""
_CLUSTER = "\0"  # starts the posting of a synonym cluster; no text term can


@dataclass(frozen=True, slots=True)
class RankedBlock:
    block_id: int
    score: float
    """0 .. 1, comparable within one route only."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    blocks: tuple[RankedBlock, ...]
    """Best first, ties to the lower block id."""
    confidence: float
    """0 .. 1: how much of the question's weight the best block by postings holds."""
    searched: Literal["postings", "all"]
    """all: confidence was low, so the summary of every cold block was compared."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.blocks)


@dataclass(slots=True)
class _Entry:
    text: str
    vectors: Tensor | None
    cold: bool = True


class ColdRouter:
    """Knows the text of blocks that have left the device. Not thread-safe: one owner calls it
    between steps.

    With ``encoder=None`` it is lexical only and a low confidence has nothing to fall back to.
    RouterError when the encoder is not what it or the configuration says.
    """

    def __init__(
        self,
        encoder: SummaryEncoder | None,
        synonyms: SynonymTable | None = None,
        config: RouterConfig | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.encoder = encoder
        if encoder is not None:
            check_encoder(encoder, self.config.summary_dimension)
        self._synonyms = synonyms or SynonymTable()
        self._entries: dict[int, _Entry] = {}
        self._postings = Postings(self.config.k1, self.config.b)
        self._matrix: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Cold blocks."""
        return len(self._postings)

    def add(self, texts: Mapping[int, str]) -> None:
        """Blocks become cold for the first time: their source text is summarised, once."""
        for block_id in texts:
            self._refuse_known(block_id)
        for block_id, text in texts.items():
            self._insert(block_id, _Entry(text, self.summarise(text)))

    def restore(self, block_id: int, text: str, summary: Tensor) -> None:
        """Add a block whose summary [chunks, dimension] was stored. RouterError on another shape
        than this encoder's."""
        self._refuse_known(block_id)
        encoder = self._needs_encoder()
        if summary.ndim != 2 or not len(summary) or summary.shape[1] != encoder.dimension:
            raise RouterError(
                f"the stored summary of block {block_id} is {tuple(summary.shape)}; encoder "
                f"{encoder.name!r} makes [chunks, {encoder.dimension}]: summarise the text again"
            )
        self._insert(block_id, _Entry(text, summary.float().clone()))

    def remove(self, block_ids: Iterable[int]) -> None:
        """Forget blocks, because their context is released."""
        for block_id in block_ids:
            if self._entry(block_id).cold:
                self._leave(block_id)
            del self._entries[block_id]

    def warmed(self, block_ids: Iterable[int]) -> None:
        """Blocks are on the device again: no longer routed to, summary and text kept."""
        for block_id in block_ids:
            if not self._entry(block_id).cold:
                raise RouterError(f"block {block_id} is warm already")
            self._leave(block_id)

    def evicted(self, block_ids: Iterable[int]) -> None:
        """Blocks that were warmed are cold again; nothing is computed."""
        for block_id in block_ids:
            if self._entry(block_id).cold:
                raise RouterError(f"block {block_id} is cold already")
            self._enter(block_id)

    def summary(self, block_id: int) -> Tensor:
        """fp32 [chunks, dimension], a copy. The dimension is a chunk's: chunks are rows and are
        never concatenated."""
        self._needs_encoder()
        vectors = self._entry(block_id).vectors
        assert vectors is not None, "with an encoder every block has a summary"
        return vectors.clone()

    def use_synonyms(self, synonyms: SynonymTable) -> None:
        """Index the cold blocks again with an edited table; summaries stay."""
        self._synonyms = synonyms
        cold = [block_id for block_id, entry in self._entries.items() if entry.cold]
        self._postings = Postings(self.config.k1, self.config.b)
        for block_id in cold:
            self._enter(block_id)

    def route(self, question: str, budget: int) -> Route:
        """At most ``budget`` cold blocks for a question. Blocks that nothing speaks for are not
        named."""
        if budget < 1:
            raise RouterError(f"budget {budget} of a route; expected at least one block")
        matches = self._postings.search(self._weights(question))
        confidence = max((match.coverage for match in matches.values()), default=0.0)
        searched: Literal["postings", "all"] = "postings"
        cosines: dict[int, float] = {}
        if self.encoder is not None and len(self):
            everything = confidence < self.config.fallback_below
            cosines = self._cosines(question)
            if everything:
                searched = "all"
            else:
                cosines = {block_id: cosines[block_id] for block_id in matches}
        candidates = {block_id for block_id, cosine in cosines.items() if cosine > 0} | set(matches)
        lexical = {block_id: match.score for block_id, match in matches.items()}
        scores = _blend(candidates, lexical, cosines, self._encoder_share(question))
        ranked = [
            RankedBlock(block_id, scores[block_id], _reasons(matches.get(block_id), cosine))
            for block_id, cosine in ((b, cosines.get(b)) for b in candidates)
        ]
        ranked.sort(key=lambda block: (-block.score, block.block_id))
        return Route(tuple(self._with_neighbours(ranked, budget)), confidence, searched)

    def _weights(self, question: str) -> dict[str, float]:
        weights = dict.fromkeys(terms(question), 1.0)
        for name, confidence in self._synonyms.find(question).items():
            weights[_CLUSTER + name] = confidence
        return weights

    def _encoder_share(self, question: str) -> float:
        """Weight of the summary's cosine, by the script that the question is written in."""
        if self.encoder is None:
            return 0.0
        cjk = cjk_share(question)
        return (1 - cjk) * self.config.encoder_weight + cjk * self.config.encoder_weight_cjk

    def _with_neighbours(self, ranked: list[RankedBlock], budget: int) -> list[RankedBlock]:
        reach = self.config.neighbours
        chosen: dict[int, RankedBlock] = {}
        for block in ranked:
            chosen.setdefault(block.block_id, block)
            for distance in range(1, reach + 1):
                for near in (block.block_id - distance, block.block_id + distance):
                    entry = self._entries.get(near)
                    if entry is not None and entry.cold and near not in chosen:
                        reason = f"next to block {block.block_id}"
                        chosen[near] = RankedBlock(near, block.score, (reason,))
            if len(chosen) >= budget:
                break
        return list(chosen.values())[:budget]

    def _cosines(self, question: str) -> dict[int, float]:
        """Best chunk of each cold block."""
        encoder = self._needs_encoder()
        if self._matrix is None:
            parts = [
                (block_id, entry.vectors)
                for block_id, entry in self._entries.items()
                if entry.cold and entry.vectors is not None
            ]
            owners = [block_id for block_id, vectors in parts for _ in range(len(vectors))]
            self._matrix = torch.tensor(owners), torch.cat([vectors for _, vectors in parts])
        owners, matrix = self._matrix
        # a question longer than a chunk asks with each of its chunks
        asked = encoder.encode(encoder.split(question))
        best: dict[int, float] = {}
        similarities = (matrix @ asked.T).amax(dim=1)
        for block_id, cosine in zip(owners.tolist(), similarities.tolist(), strict=True):
            best[block_id] = max(cosine, best.get(block_id, -1.0))
        return best

    def summarise(self, text: str) -> Tensor | None:
        """Summary of a block's text, fp32 [chunks, dimension]; None without an encoder."""
        if self.encoder is None:
            return None
        if not text.strip():  # a block of special tokens: no question leads to it
            return torch.zeros(1, self.encoder.dimension)
        return self.encoder.encode(self.encoder.split(text))

    def _insert(self, block_id: int, entry: _Entry) -> None:
        self._entries[block_id] = entry
        self._enter(block_id)

    def _enter(self, block_id: int) -> None:
        entry = self._entries[block_id]
        entry.cold = True
        clusters = [_CLUSTER + name for name in self._synonyms.find(entry.text)]
        self._postings.add(block_id, terms(entry.text), clusters)
        self._matrix = None

    def _leave(self, block_id: int) -> None:
        self._entries[block_id].cold = False
        self._postings.remove(block_id)
        self._matrix = None

    def _entry(self, block_id: int) -> _Entry:
        entry = self._entries.get(block_id)
        if entry is None:
            raise RouterError(f"block {block_id} is unknown to the router; add its text first")
        return entry

    def _refuse_known(self, block_id: int) -> None:
        if block_id in self._entries:
            raise RouterError(
                f"block {block_id} has its summary; evicted() makes it cold again, remove() first "
                "if its text changed"
            )

    def _needs_encoder(self) -> SummaryEncoder:
        if self.encoder is None:
            raise RouterError("this router has no encoder, so no summaries; give it one")
        return self.encoder


def _blend(
    candidates: Iterable[int],
    lexical: Mapping[int, float],
    cosines: Mapping[int, float],
    share: float,
) -> dict[int, float]:
    """Weighted mean of both, each over its best: cosines of one language lie close together and
    BM25 scores of a paraphrase near 0, so as they are one would always drown the other."""
    best_lexical = max(lexical.values(), default=0.0) or 1.0
    best_cosine = max(_CLEAR_COSINE, *cosines.values(), 0.0)
    return {
        block_id: (1 - share) * lexical.get(block_id, 0.0) / best_lexical
        + share * max(0.0, cosines.get(block_id, 0.0)) / best_cosine
        for block_id in candidates
    }


def _reasons(match: Match | None, cosine: float | None) -> tuple[str, ...]:
    reasons: list[str] = []
    if match is not None:
        words = [term for term in match.terms if not term.startswith(_CLUSTER)]
        clusters = [term[1:] for term in match.terms if term.startswith(_CLUSTER)]
        if words:
            reasons.append("words: " + ", ".join(words))
        if clusters:
            reasons.append("synonyms: " + ", ".join(clusters))
    if cosine is not None:
        reasons.append(f"summary: cosine {cosine:.2f}")
    return tuple(reasons)
