"""Long contexts in chunks: each is computed, and tried again, on its own.

A chunk's KV depends on all tokens before it, so chunks are computed one after the other; a chunk
that fails is tried again with the KV of those before it kept. Its summary depends on its own text
alone, so summaries are made beside, all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from engine.errors import (
    ContextLost,
    ContextTooLong,
    EngineError,
    InvalidStateError,
    NotSupportedError,
    TryAgainLater,
)
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextId, ContextPolicy

T = TypeVar("T")
CHUNK_TOKENS = 32_768
"""What the model's authors split 128K contexts into."""
_HOPELESS = (ContextLost, ContextTooLong, InvalidStateError, NotSupportedError)
"""Errors that the same call would meet again."""


@dataclass(frozen=True, slots=True)
class ChunkedContext:
    """``contexts``: one that holds all tokens, or one for each chunk when ``approximate``: then no
    chunk has seen the others. ``attempts``: how often each chunk was computed. ``summaries``: what
    ``get_kv_summary`` said of each chunk alone, None where the engine keeps no vectors."""

    contexts: tuple[ContextId, ...]
    attempts: tuple[int, ...]
    summaries: tuple[np.ndarray | None, ...]
    approximate: bool

    @property
    def ctx(self) -> ContextId:
        """The one context; InvalidStateError when the chunks are independent."""
        if self.approximate:
            raise InvalidStateError(
                f"{len(self.contexts)} independent chunks are {len(self.contexts)} contexts, none "
                "holds the whole text; open it with independent_chunks=False"
            )
        return self.contexts[0]


async def init_in_chunks(
    runtime: ModelRuntime,
    token_ids: Sequence[int],
    policy: ContextPolicy,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    retries: int = 2,
    pause_s: float = 0.05,
    summaries: bool = False,
    independent_chunks: bool = False,
) -> ChunkedContext:
    """``init_context`` of ``token_ids``, exactly, chunk by chunk.

    ``retries``: more attempts a chunk gets after an error that may pass. A chunk that fails for
    good fails the call, and what was opened is released. ``summaries``: also ask for the vectors of
    each chunk. ``independent_chunks``: one context a chunk, all at once; faster, and approximate,
    because no chunk attends to another.
    """
    if chunk_tokens < 1 or retries < 0:
        raise ValueError(
            f"chunk_tokens={chunk_tokens}, retries={retries}; expected at least 1 and at least 0"
        )
    chunks = [token_ids[i : i + chunk_tokens] for i in range(0, len(token_ids), chunk_tokens)]
    if not chunks:
        raise InvalidStateError("init_context got no tokens, expected at least one")
    plan = _Chunks(runtime, policy, chunks, retries, pause_s)
    try:
        async with asyncio.TaskGroup() as group:
            vectors = group.create_task(plan.summarise()) if summaries else None
            opened = group.create_task(plan.apart() if independent_chunks else plan.in_order())
    except BaseExceptionGroup as failures:
        await plan.release()
        raise _first(failures) from None
    except asyncio.CancelledError:
        await plan.release()
        raise
    return ChunkedContext(
        opened.result(),
        tuple(plan.attempts),
        (None,) * len(chunks) if vectors is None else vectors.result(),
        independent_chunks,
    )


class _Chunks:
    """One call of ``init_in_chunks``."""

    def __init__(
        self,
        runtime: ModelRuntime,
        policy: ContextPolicy,
        chunks: Sequence[Sequence[int]],
        retries: int,
        pause_s: float,
    ) -> None:
        self._runtime = runtime
        self._policy = policy
        self._chunks = chunks
        self._retries = retries
        self._pause_s = pause_s
        self._open: set[ContextId] = set()
        self.attempts = [1] * len(chunks)

    async def in_order(self) -> tuple[ContextId]:
        """A fork waits until its parent's tokens are computed: it is how a chunk is computed now,
        and a failed one leaves the chunks before it as they are."""
        ctx = await self._again(0, lambda: self._begin(0))
        await self._again(0, lambda: self._compute(ctx))
        for number, chunk in enumerate(self._chunks[1:], 1):
            await self._runtime.append(ctx, chunk)
            await self._again(number, lambda: self._compute(ctx))
        return (ctx,)

    async def apart(self) -> tuple[ContextId, ...]:
        async def one(number: int) -> ContextId:
            ctx = await self._again(number, lambda: self._begin(number))
            await self._again(number, lambda: self._compute(ctx))
            return ctx

        return await self._all(one)

    async def summarise(self) -> tuple[np.ndarray | None, ...]:
        async def one(number: int) -> np.ndarray | None:
            ctx = await self._retried(lambda: self._begin(number, replace(self._policy, draw=None)))
            vectors = (await self._retried(lambda: self._runtime.get_kv_summary(ctx))).vectors
            await self._drop(ctx)
            return vectors

        return await self._all(one)

    async def _all(self, one: Callable[[int], Coroutine[Any, Any, T]]) -> tuple[T, ...]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(len(self._chunks))]
        return tuple(task.result() for task in tasks)

    async def release(self) -> None:
        for ctx in list(self._open):
            await self._drop(ctx)

    async def _begin(self, number: int, policy: ContextPolicy | None = None) -> ContextId:
        ctx = await self._runtime.init_context(self._chunks[number], policy or self._policy)
        self._open.add(ctx)
        return ctx

    async def _compute(self, ctx: ContextId) -> None:
        child = await self._runtime.fork(ctx)
        await self._runtime.release(child)

    async def _drop(self, ctx: ContextId) -> None:
        self._open.discard(ctx)
        await self._runtime.release(ctx)

    async def _again(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """``call``, counted as attempts of chunk ``number``."""

        def failed() -> None:
            self.attempts[number] += 1

        return await self._retried(call, failed)

    async def _retried(
        self, call: Callable[[], Awaitable[T]], failed: Callable[[], None] | None = None
    ) -> T:
        for attempt in range(self._retries + 1):
            try:
                return await call()
            except _HOPELESS:
                raise
            except EngineError as error:
                if attempt == self._retries:
                    raise
                if failed is not None:
                    failed()
                wait_s = self._pause_s * 2**attempt
                if isinstance(error, TryAgainLater):
                    wait_s = max(wait_s, error.retry_after_s)
                await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error = failures.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", error))
    return error
