"""RoutedRuntime: a ModelRuntime behind the batch router, for engines that serve people.

Rollouts bring their own bound on concurrency and talk to the engine itself. Thread-safe: calls may
come from any thread or event loop, as MRI says.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.errors import NotSupportedError, RateLimited
from engine.light.rate import TokenBucket
from engine.light.waiting_room import RouterConfig, RouterCounts, Ticket, WaitingRoom
from engine.runtime.protocol import ModelRuntime, Streaming
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)


@dataclass(frozen=True, slots=True)
class RouterState:
    """For metrics and alarms; ``counts`` are since the start."""

    waiting: int
    running: int
    limit: int
    room: int
    at_peak: bool
    closed: str
    counts: RouterCounts


@dataclass(slots=True)
class _Known:
    """What the router remembers of a context."""

    policy: ContextPolicy
    num_tokens: int
    unpaid: int
    """Tokens of the prompt that no step has paid for yet."""
    waits: Ticket | None = None
    """The step that waits or runs."""


class RoutedRuntime:
    """MRI and Streaming over ``runtime``; only steps wait, everything else passes through."""

    def __init__(
        self,
        runtime: ModelRuntime,
        config: RouterConfig,
        *,
        kv_bytes: Callable[[int], int],
        kv_bytes_total: int,
        clock: Callable[[], float] = time.monotonic,
        on_peak: Callable[[bool], None] | None = None,
    ) -> None:
        """``kv_bytes(n)``: what a context of n tokens holds on the device, of
        ``kv_bytes_total``. ``on_peak`` is told when a peak begins and ends; must not block."""
        self._runtime = runtime
        self._kv_bytes = kv_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._room = WaitingRoom(config, kv_bytes_total)
        self._buckets = {name: TokenBucket(rate, clock()) for name, rate in config.classes.items()}
        self._contexts: dict[ContextId, _Known] = {}
        self._on_peak = on_peak
        self._was_at_peak = False

    def state(self) -> RouterState:
        with self._lock:
            room = self._room
            return RouterState(
                room.num_waiting,
                room.num_running,
                room.limit,
                room.room,
                room.at_peak,
                room.closed,
                replace(room.counts),
            )

    def refuse(self, why: str) -> None:
        """Take no new requests (429 with ``why``) until ``why`` is empty; running ones go on."""
        with self._lock:
            self._room.closed = why

    # -- steps ----------------------------------------------------------------------------------

    async def forward_step(self, request: StepRequest) -> StepResult:
        """As MRI; RateLimited, Overloaded, CapacityError or DeadlineExceeded before it begins."""
        async with self._turn(request) as (begun, ended):
            if begun is None:
                return await self._cancelled(request.ctx)
            result = await self._runtime.forward_step(begun)
            ended(result)
            return result

    async def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]:
        """As ``forward_step``, token by token."""
        if not isinstance(self._runtime, Streaming):
            raise NotSupportedError(
                f"{type(self._runtime).__name__} cannot stream; ask for the whole answer"
            )
        async with self._turn(request) as (begun, ended):
            if begun is None:
                yield await self._cancelled(request.ctx)
                return
            stream = self._runtime.stream_step(begun)
            try:
                async for part in stream:
                    if isinstance(part, StepResult):
                        ended(part)
                    yield part
            finally:
                closing = getattr(stream, "aclose", None)
                if closing is not None:
                    await closing()

    @asynccontextmanager
    async def _turn(
        self, request: StepRequest
    ) -> AsyncIterator[tuple[StepRequest | None, Callable[[StepResult], None]]]:
        """Wait for the turn; (what is left of the request or None when it was cancelled meanwhile,
        what takes its result)."""
        now = self._clock()
        deadline = math.inf if request.deadline_s is None else now + request.deadline_s
        with self._lock:
            known = self._contexts.get(request.ctx) or _Known(ContextPolicy(), 0, 0)
            policy, asked = known.policy, known.unpaid + request.max_new_tokens
            self._pay(policy.rate_class, asked, now)
            tokens = known.num_tokens + request.max_new_tokens
            ticket = Ticket(policy.priority, self._kv_bytes(tokens), now, deadline)
            try:
                self._room.enter(ticket, now)
            except BaseException:
                self._refund(policy.rate_class, asked, now)
                raise
            known.waits = ticket
            self._tell_peak()
        sampled = 0
        computed = False

        def ended(result: StepResult) -> None:
            nonlocal sampled
            sampled = len(result.token_ids)

        try:
            if not await self._wait(ticket):
                yield None, ended
                return
            computed = True
            if request.deadline_s is not None:
                left = max(0.0, deadline - self._clock())
                request = replace(request, deadline_s=left)
            yield request, ended
        finally:
            with self._lock:
                now = self._clock()
                known.waits = None
                if computed:
                    known.num_tokens += sampled
                    known.unpaid = 0
                    self._refund(policy.rate_class, request.max_new_tokens - sampled, now)
                else:
                    self._refund(policy.rate_class, asked, now)
                self._room.leave(ticket, now)
                self._tell_peak()

    def _tell_peak(self) -> None:
        """Within the lock, so that the last one told is the last that was."""
        at_peak = self._room.at_peak
        if at_peak != self._was_at_peak:
            self._was_at_peak = at_peak
            if self._on_peak is not None:
                self._on_peak(at_peak)

    async def _wait(self, ticket: Ticket) -> bool:
        """Until the router lets it run, or False: cancelled. DeadlineExceeded also when nothing
        else ever happens."""
        turn = asyncio.wrap_future(ticket.future)
        while not turn.done():
            left = ticket.deadline - self._clock()
            await asyncio.wait({turn}, timeout=None if math.isinf(left) else max(0.0, left))
            if not turn.done():
                with self._lock:
                    self._room.admit(self._clock())
                await asyncio.sleep(0)
        if turn.cancelled():
            return False
        turn.result()
        return True

    async def _cancelled(self, ctx: ContextId) -> StepResult:
        """Of a step that was cancelled before its turn came."""
        info = await self._runtime.info()
        with self._lock:
            known = self._contexts.get(ctx)
        return StepResult(
            token_ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            finish="cancelled",
            weight_version=info.weight_version,
            start=0 if known is None else known.num_tokens,
        )

    def _pay(self, rate_class: str, tokens: int, now: float) -> None:
        bucket = self._buckets.get(rate_class)
        if bucket is None:
            return
        wait_s = bucket.take(tokens, now)
        if wait_s:
            self._room.counts.rate_limited += 1
            raise RateLimited(
                f"rate class {rate_class!r} has used up its tokens; {tokens} more fit in "
                f"{wait_s:.1f} s",
                wait_s,
            )

    def _refund(self, rate_class: str, tokens: int, now: float) -> None:
        bucket = self._buckets.get(rate_class)
        if bucket is not None and tokens > 0:
            bucket.give_back(tokens, now)

    # -- everything else ------------------------------------------------------------------------

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        """Overloaded while the router is closed."""
        with self._lock:
            self._room.require_open()
        ctx = await self._runtime.init_context(token_ids, policy, media)
        with self._lock:
            self._contexts[ctx] = _Known(policy, len(token_ids), len(token_ids))
        return ctx

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        await self._runtime.append(ctx, token_ids, media)
        with self._lock:
            known = self._contexts.get(ctx)
            if known is not None:
                known.num_tokens += len(token_ids)
                known.unpaid += len(token_ids)

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        child = await self._runtime.fork(ctx, policy)
        with self._lock:
            parent = self._contexts.get(ctx)
            if parent is not None:
                # the blocks are the parent's: nothing to pay for
                self._contexts[child] = _Known(policy or parent.policy, parent.num_tokens, 0)
        return child

    async def release(self, ctx: ContextId) -> None:
        with self._lock:
            self._contexts.pop(ctx, None)
        await self._runtime.release(ctx)

    async def cancel(self, ctx: ContextId) -> None:
        with self._lock:
            known = self._contexts.get(ctx)
            if known is not None and known.waits is not None and known.waits.future.cancel():
                return  # it had not begun: the engine does not know of it
        await self._runtime.cancel(ctx)

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        return await self._runtime.get_kv_summary(ctx)

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        return await self._runtime.evict_kv(ctx, selector)

    async def load_weights(self, weights: WeightSet) -> int:
        return await self._runtime.load_weights(weights)

    async def info(self) -> EngineInfo:
        return await self._runtime.info()
