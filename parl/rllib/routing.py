"""RoutedRuntime: many engines behind one MRI door. A group has one engine, tasks spread evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.errors import ContextLost
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    StepRequest,
    StepResult,
    WeightSet,
)


class RoutedRuntime:
    """Context ids are ``<engine>:<its id>``, so nothing has to be remembered.

    The engine of a new context is its draw's task index modulo the number of engines: all samples
    of a group meet where their prompt's KV is, and the choice depends on nothing else.
    """

    def __init__(self, engines: Sequence[ModelRuntime]) -> None:
        assert engines, "a routed runtime needs at least one engine"
        self._engines = tuple(engines)

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        index = 0 if policy.draw is None else policy.draw.task % len(self._engines)
        return _named(index, await self._engines[index].init_context(token_ids, policy, media))

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        _, engine, inner = self._find(ctx)
        await engine.append(inner, token_ids, media)

    async def forward_step(self, request: StepRequest) -> StepResult:
        _, engine, inner = self._find(request.ctx)
        return await engine.forward_step(replace(request, ctx=inner))

    async def cancel(self, ctx: ContextId) -> None:
        _, engine, inner = self._find(ctx)
        await engine.cancel(inner)

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        _, engine, inner = self._find(ctx)
        return await engine.get_kv_summary(inner)

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        _, engine, inner = self._find(ctx)
        return await engine.evict_kv(inner, selector)

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        index, engine, inner = self._find(ctx)
        return _named(index, await engine.fork(inner, policy))

    async def release(self, ctx: ContextId) -> None:
        _, engine, inner = self._find(ctx)
        await engine.release(inner)

    async def load_weights(self, weights: WeightSet) -> int:
        """Every engine; the version they all report."""
        versions = {await engine.load_weights(weights) for engine in self._engines}
        assert len(versions) == 1, f"engines report versions {sorted(versions)} after one load"
        return versions.pop()

    async def info(self) -> EngineInfo:
        """Of the first engine; all are started alike."""
        return await self._engines[0].info()

    def _find(self, ctx: ContextId) -> tuple[int, ModelRuntime, ContextId]:
        index, _, inner = ctx.partition(":")
        if not inner or not index.isdigit() or int(index) >= len(self._engines):
            raise ContextLost(
                f"context {ctx!r} names none of {len(self._engines)} engines; build it again"
            )
        return int(index), self._engines[int(index)], ContextId(inner)


def _named(index: int, ctx: ContextId) -> ContextId:
    return ContextId(f"{index}:{ctx}")
