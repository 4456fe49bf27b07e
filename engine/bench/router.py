"""Does the cold router find the block? ``python -m engine.bench.router``.

Recall@k on the paraphrase set: the share of questions whose one answering block is among the first
k. Lexical postings, encoder and both, with and without the synonym file, for all questions and for
each author's: the second did not know the synonym file, which the first wrote. The figures are of
the half of the facts that nothing was chosen on; ``--tune`` prints the grid over the other half.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.bench.paraphrases import LANGUAGES, ParaphraseSet, Question, paraphrase_set
from engine.kvcache.router import (
    ColdRouter,
    HashingEncoder,
    MiniLMEncoder,
    RouterConfig,
    SummaryEncoder,
    SynonymTable,
)

KS = (1, 4, 8, 16)


class Remembering:
    """An encoder that keeps its vectors: several routers of one bench encode the same texts."""

    def __init__(self, encoder: SummaryEncoder) -> None:
        self._encoder = encoder
        self._vectors: dict[str, Tensor] = {}
        self.name, self.dimension = encoder.name, encoder.dimension
        self.split = encoder.split

    def encode(self, texts: Sequence[str]) -> Tensor:
        for text in texts:
            if text not in self._vectors:
                self._vectors[text] = self._encoder.encode([text])[0]
        return torch.stack([self._vectors[text] for text in texts])


@dataclass(frozen=True, slots=True)
class Recall:
    ranks: tuple[tuple[Question, int | None], ...]
    """Rank of the answering block from 0, None when it was not named."""
    all_searched: int
    """Questions whose confidence was low."""
    ms: float
    """CPU milliseconds a route, without encoding the question when vectors are remembered."""

    def of(self, questions: Sequence[Question]) -> Recall:
        """The same for some of the questions; ``ms`` and ``all_searched`` stay those of all."""
        wanted = set(questions)
        return replace(self, ranks=tuple(pair for pair in self.ranks if pair[0] in wanted))

    def at(self, k: int, language: str | None = None) -> float:
        ranks = [rank for q, rank in self.ranks if language in (None, q.language)]
        return sum(rank is not None and rank < k for rank in ranks) / len(ranks)


def recall(router: ColdRouter, questions: Sequence[Question]) -> Recall:
    """Routes every question with a budget of max(KS)."""
    ranks: list[tuple[Question, int | None]] = []
    all_searched = 0
    begin = time.thread_time()
    for question in questions:
        route = router.route(question.text, max(KS))
        ids = route.block_ids
        ranks.append((question, ids.index(question.block_id) if question.block_id in ids else None))
        all_searched += route.searched == "all"
    spent = time.thread_time() - begin
    return Recall(tuple(ranks), all_searched, 1e3 * spent / len(questions))


def make_router(
    pool: ParaphraseSet, encoder: SummaryEncoder | None, synonyms: bool, config: RouterConfig
) -> ColdRouter:
    router = ColdRouter(encoder, SynonymTable.load() if synonyms else None, config)
    router.add(pool.blocks)
    return router


def report(pool: ParaphraseSet, encoder: SummaryEncoder, config: RouterConfig) -> str:
    questions = pool.of("test")
    second = pool.of("test", "second")
    parts = {
        "all": questions,
        "first author": pool.of("test", "first"),
        "second author": second,
        "second author, facts of the first": [q for q in second if not q.new_fact],
        "second author, own facts": [q for q in second if q.new_fact],
    }
    only = config.model_copy(
        update={"encoder_weight": 1.0, "encoder_weight_cjk": 1.0, "fallback_below": 1.0}
    )
    rows = [
        ("lexical", None, False, config),
        ("lexical + synonyms", None, True, config),
        ("encoder only", encoder, False, only),
        ("lexical, encoder", encoder, False, config),
        ("lexical, encoder + synonyms", encoder, True, config),
    ]
    results = {
        name: recall(make_router(pool, used, synonyms, settings), questions)
        for name, used, synonyms, settings in rows
    }
    lines = [
        f"{len(pool.blocks)} cold blocks, {len(pool.questions)} questions; encoder {encoder.name}, "
        f"encoder_weight {config.encoder_weight}, cjk {config.encoder_weight_cjk}, "
        f"fallback_below {config.fallback_below}",
        f"{'router':<30} all searched  ms/route",
    ]
    for name, result in results.items():
        lines.append(f"{name:<30} {result.all_searched / len(questions):12.0%} {result.ms:9.2f}")
    for title, part in parts.items():
        overlap = sum(map(pool.overlap, part)) / len(part)
        lines.append(
            f"test half, {title}: {len(part)} questions "
            f"({sum(q.language == 'zh' for q in part)} zh), {overlap:.0%} of a question's content "
            "terms are in its block"
        )
        lines.append(f"{'':<30}" + "".join(f"   @{k:<3}" for k in KS) + "   en@8   zh@8")
        for name, result in results.items():
            of_part = result.of(part)
            lines.append(
                f"{name:<30}"
                + "".join(f" {of_part.at(k):6.1%}" for k in KS)
                + f" {of_part.at(8, 'en'):6.1%} {of_part.at(8, 'zh'):6.1%}"
            )
    return "\n".join(lines)


def tune(pool: ParaphraseSet, encoder: SummaryEncoder) -> str:
    """Recall on the tune half by language, synonyms on; each language looks at its own weight. Both
    authors' questions; what is the default was chosen on the first author's alone."""
    fallbacks = (0.0, 0.3, 0.5, 1.0)
    lines = [
        "tune half, recall en @1 @8, zh @1 @8 by weight (rows) and fallback_below (columns)",
        "weight " + "".join(f"{fallback:>30}" for fallback in fallbacks),
    ]
    for weight in (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9):
        cells: list[str] = []
        for fallback in fallbacks:
            config = RouterConfig(
                encoder_weight=weight, encoder_weight_cjk=weight, fallback_below=fallback
            )
            result = recall(make_router(pool, encoder, True, config), pool.of("tune"))
            for language in LANGUAGES:
                cells.append(f"{result.at(1, language):8.1%}{result.at(8, language):7.1%}")
        lines.append(f"{weight:<7}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", choices=("minilm", "hashing"), default="minilm")
    parser.add_argument("--distractors", type=int, default=400)
    parser.add_argument("--tune", action="store_true", help="the grid on the tune half instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool = paraphrase_set(num_distractors=options.distractors)
    encoder = Remembering(MiniLMEncoder() if options.encoder == "minilm" else HashingEncoder())
    text = tune(pool, encoder) if options.tune else report(pool, encoder, RouterConfig())
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
