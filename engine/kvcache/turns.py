"""TurnRouter: which cold blocks a turn's new tokens ask for, context by context.

One ``ColdRouter`` a context knows the text of its cold blocks, made from token ids by a callable of
the caller's: an engine needs no tokenizer for anything else. Summaries of texts are kept, so a fork
or a context that is built again costs no second encoding. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from engine.kvcache.config import BLOCK, ColdRouterConfig
from engine.kvcache.router.encoder import HashingEncoder, SummaryEncoder
from engine.kvcache.router.minilm import MiniLMEncoder
from engine.kvcache.router.router import ColdRouter, Route
from engine.kvcache.router.synonyms import SHIPPED, SynonymTable

TextOf = Callable[[Sequence[int]], str]
"""Token ids -> text; a piece of a word at either end may come out as it likes."""
MAX_SUMMARIES = 1 << 16
"""Blocks whose summaries are remembered, 100 MB with MiniLM; the oldest go first."""


class TurnRouter:
    def __init__(
        self, config: ColdRouterConfig, text_of: TextOf, encoder: SummaryEncoder | None = None
    ) -> None:
        """``encoder``: instead of the one that ``config`` names. RouterError when it or the synonym
        file does not work."""
        self.config = config
        self._text_of = text_of
        self._encoder = encoder or _encoder(config.encoder)
        self._synonyms = SynonymTable.load(config.synonyms or SHIPPED)
        # an encoder of another dimension than was asked for must not start
        ColdRouter(self._encoder, self._synonyms, config.ranking)
        self._routers: dict[str, ColdRouter] = {}
        self._known: dict[str, dict[int, bool]] = {}
        """By context: blocks with a text, and whether they were cold when last looked at."""
        self._summaries: dict[str, Tensor] = {}

    @property
    def has_summaries(self) -> bool:
        return self._encoder is not None

    def route(
        self, ctx: str, tokens: Sequence[int], cold: Iterable[int], question: Sequence[int]
    ) -> Route:
        """At most ``config.budget`` of the ``cold`` blocks of a context, best first."""
        router = self._synchronised(ctx, tokens, cold)
        return router.route(self._text_of(list(question)), self.config.budget)

    def vectors(self, ctx: str, tokens: Sequence[int], cold: Iterable[int]) -> np.ndarray:
        """Summaries of the ``cold`` blocks in order, fp32 [chunks, dimension]."""
        assert self._encoder is not None, "asked of a router without summaries"
        blocks = sorted(cold)
        router = self._synchronised(ctx, tokens, blocks)
        parts = [router.summary(block).numpy() for block in blocks]
        return np.concatenate([np.zeros((0, self._encoder.dimension), np.float32), *parts])

    def prepare(self, tokens: Sequence[int], cold: Iterable[int], limit: int) -> int:
        """Encode up to ``limit`` of the ``cold`` blocks that no turn has looked at yet, so that the
        next one need not wait for it; how many."""
        done = 0
        if self._encoder is None:
            return done
        maker = ColdRouter(self._encoder, self._synonyms, self.config.ranking)
        for block in cold:
            if done >= limit:
                break
            text = self._text_of(list(tokens[BLOCK * block : BLOCK * (block + 1)]))
            if text not in self._summaries:
                self._summary(maker, text)
                done += 1
        return done

    def forget(self, ctx: str) -> None:
        self._routers.pop(ctx, None)
        self._known.pop(ctx, None)

    def _synchronised(self, ctx: str, tokens: Sequence[int], cold: Iterable[int]) -> ColdRouter:
        router = self._routers.get(ctx)
        if router is None:
            router = ColdRouter(self._encoder, self._synonyms, self.config.ranking)
            self._routers[ctx], self._known[ctx] = router, {}
        known, wanted = self._known[ctx], set(cold)
        router.warmed([b for b, was_cold in known.items() if was_cold and b not in wanted])
        router.evicted([b for b, was_cold in known.items() if not was_cold and b in wanted])
        for block in sorted(wanted - set(known)):
            text = self._text_of(list(tokens[BLOCK * block : BLOCK * (block + 1)]))
            if self._encoder is None:
                router.add({block: text})
            else:
                router.restore(block, text, self._summary(router, text))
        known.update(dict.fromkeys(known, False))
        known.update(dict.fromkeys(wanted, True))
        return router

    def _summary(self, router: ColdRouter, text: str) -> Tensor:
        found = self._summaries.get(text)
        if found is None:
            found = router.summarise(text)
            assert found is not None, "asked with an encoder"
            while len(self._summaries) >= MAX_SUMMARIES:
                del self._summaries[next(iter(self._summaries))]
            self._summaries[text] = found
        return found


def _encoder(name: str) -> SummaryEncoder | None:
    if name == "none":
        return None
    return MiniLMEncoder() if name == "minilm" else HashingEncoder()
