"""TurnStarts: what happens to a tiered context between two of its batches.

A turn's new tokens may ask for cold blocks (engine.kvcache.turns): those are fetched just before
the first of these tokens, and the last one sampled, is computed. A context that is computed again
moves its blocks as it did before, at the same lengths. Both stop a context's rows at a position
(``Context.pause``) that depends on its tokens and earlier turns alone, so bits do not depend on
when or in which pieces it is computed. A turn ends where a step or a fork begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import groupby

import structlog

from engine.errors import BlockCorrupt, CapacityError, EngineError
from engine.kvcache.quantise import BLOCK
from engine.kvcache.table import TierEvent
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import Tier
from engine.kvcache.turns import TurnRouter
from engine.light.context import Context

MakeRoom = Callable[[Context, int], int]
"""(context, warm blocks wanted for it) -> warm blocks that are free"""
log = structlog.get_logger(__name__)


class TurnStarts:
    def __init__(self, kv: TieredKV, router: TurnRouter | None, make_room: MakeRoom) -> None:
        self._kv = kv
        self._router = router
        self._make_room = make_room

    def begin(self, context: Context, start: int) -> None:
        """Tokens from ``start`` on are new."""
        if self._router is not None and context.turn is None:
            context.turn = start

    def serve(self, context: Context, held: int) -> bool:
        """Everything due at ``held`` computed positions; sets ``pause`` to where the next is due.
        Whether blocks are still on their way. CapacityError, BlockCorrupt."""
        pending = False
        while True:
            replay = self._to_replay(context)
            routed = self._routed_at(context)
            stops = [event.length for event in replay[:1]] + ([] if routed is None else [routed])
            context.pause = min(stops, default=None)
            if context.pause is None or held < context.pause:
                return pending
            due = [event for event in replay if event.length <= held]
            if due:
                wanted = sum(event.tier == Tier.WARM for event in due)
                self._make_room(context, wanted)
                self._kv.replay(context.id, due)
                context.replayed += len(due)
            else:
                pending |= self._route(context)

    def cut(self, context: Context, held: int) -> None:
        """Only ``held`` positions of KV are left."""
        lengths = [event.length for event in self._kv.events(context.id)]
        context.replayed = sum(length <= held for length in lengths) if held else 0
        context.pause = None

    def moved(self, context: Context, before: int) -> None:
        """Blocks moved now, not in a replay; ``before``: events until then."""
        context.replayed += len(self._kv.events(context.id)) - before

    def forget(self, context: Context) -> None:
        if self._router is not None:
            self._router.forget(context.id)

    def _to_replay(self, context: Context) -> list[TierEvent]:
        """What memory pressure did need not be done again, so only in deterministic mode."""
        events = self._kv.events(context.id)
        if not self._kv.config.deterministic or len(events) == context.replayed:
            return []
        return sorted(events, key=lambda event: event.length)[context.replayed :]

    def _routed_at(self, context: Context) -> int | None:
        if self._router is None or context.turn is None:
            return None
        longest = self._router.config.question_tokens
        return max(context.turn - 1, len(context.tokens) - longest, 0)

    def _route(self, context: Context) -> bool:
        router = self._router
        assert router is not None and context.turn is not None, "a turn is to be routed"
        cold = self._kv.cold_blocks(context.id)
        if not cold:
            context.turn = None
            return False
        tokens = context.tokens
        question = tokens[max(context.turn, len(tokens) - router.config.question_tokens) :]
        route = router.route(context.id, tokens, cold, question)
        chosen = self._that_fit(context, route.block_ids)
        log.debug(
            "cold_blocks_routed",
            context=context.id,
            cold=len(cold),
            blocks=chosen,
            confidence=round(route.confidence, 3),
            searched=route.searched,
        )
        pending = self._fetch(context, chosen)
        context.turn = None
        return pending

    def _that_fit(self, context: Context, blocks: tuple[int, ...]) -> list[int]:
        """All of them in deterministic mode, or CapacityError: what is read must not depend on who
        else needs memory."""
        free = self._make_room(context, len(blocks)) if blocks else 0
        if free < len(blocks) and self._kv.config.deterministic:
            raise CapacityError(
                f"{len(blocks)} cold blocks are to come back for this turn, but only {free} warm "
                "KV blocks are free; raise engine.num_warm_blocks or lower cold_router.budget"
            )
        return sorted(blocks[:free])

    def _fetch(self, context: Context, blocks: Iterable[int]) -> bool:
        assert self._router is not None, "only routed turns fetch"
        config = self._router.config
        deadline = time.monotonic() + config.timeout_s
        before = len(self._kv.events(context.id))
        pending = False
        for _, group in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
            run = [block for _, block in group]
            start, end = BLOCK * run[0], BLOCK * (run[-1] + 1)
            left = max(0.0, deadline - time.monotonic())
            done = self._kv.rewarm(context.id, start, end, config.policy, left)
            pending |= bool(done.pending)
        self.moved(context, before)
        return pending


Failed = list[tuple[Context, EngineError]]
"""Contexts whose turn could not begin, and why."""


def serve_all(
    turns: TurnStarts, contexts: Iterable[Context], held: Callable[[Context], int]
) -> tuple[list[Context], Failed]:
    """Contexts with blocks on their way, and those that failed."""
    loading: list[Context] = []
    failed: Failed = []
    for context in contexts:
        try:
            if turns.serve(context, held(context)):
                loading.append(context)
        except (CapacityError, BlockCorrupt) as error:
            failed.append((context, error))
    return loading, failed
