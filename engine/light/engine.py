"""LightEngine: MRI over our own model, with continuous batching.

One scheduler thread owns contexts, blocks and the model; callers of any thread or event loop put a
command in its queue and await a future. Each turn of the loop drains the queue (new requests join
at every step), packs decode and prefill rows of all running contexts into one batch, and samples.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.errors import ContextLost, EngineError, NotSupportedError
from engine.light.scheduler import Scheduler
from engine.model.config import ModelConfig
from engine.runtime.protocol import MRI_VERSION
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

T = TypeVar("T")
CAPABILITIES = frozenset({"logprobs", "experts", "fork", "evict", "draws", "deterministic"})


class LightEngine:
    """ModelRuntime in this process. ``close`` ends the thread; open calls get ContextLost."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        *,
        fetch_weights: Callable[[int | None], WeightSet] | None = None,
    ) -> None:
        """``fetch_weights(None)`` gives the newest weights; without it the engine refuses to step
        until ``load_weights``: a restarted engine must never serve random weights."""
        self.config = config or EngineConfig()
        self._scheduler = Scheduler(model_config, self.config)
        self._vocab_size = model_config.vocab_size
        if fetch_weights is not None:
            self._scheduler.load_weights(fetch_weights(None))
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._commands = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="light-engine", daemon=True)
        self._thread.start()

    # -- MRI ------------------------------------------------------------------------------------

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        if media:
            raise NotSupportedError(
                f"LightEngine got {len(media)} media items, it serves text only; drop them"
            )
        ctx = ContextId(uuid.uuid4().hex)
        tokens = [int(token) for token in token_ids]
        await self._ask(lambda: self._scheduler.open(ctx, tokens, policy))
        return ctx

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        if media:
            raise NotSupportedError(
                f"LightEngine got {len(media)} media items, it serves text only; drop them"
            )
        tokens = [int(token) for token in token_ids]
        await self._ask(lambda: self._scheduler.append(ctx, tokens))

    async def forward_step(self, request: StepRequest) -> StepResult:
        pending = await self._ask(lambda: self._scheduler.begin_step(request))
        return await asyncio.wrap_future(pending)

    async def cancel(self, ctx: ContextId) -> None:
        await self._ask(lambda: self._scheduler.cancel(ctx))

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        return await self._ask(lambda: self._scheduler.summary(ctx))

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        return await self._ask(lambda: self._scheduler.evict(ctx, selector))

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        ready = await self._ask(lambda: self._scheduler.prepare_fork(ctx))
        await asyncio.wrap_future(ready)
        child = ContextId(uuid.uuid4().hex)
        await self._ask(lambda: self._scheduler.fork(ctx, child, policy))
        return child

    async def release(self, ctx: ContextId) -> None:
        await self._ask(lambda: self._scheduler.release(ctx))

    async def load_weights(self, weights: WeightSet) -> int:
        return await self._ask(lambda: self._scheduler.load_weights(weights))

    async def info(self) -> EngineInfo:
        return await self._ask(self._info)

    # -- thread ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread and wake every caller with ContextLost. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._commands.put(None)
        self._thread.join()

    async def _ask(self, call: Callable[[], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ContextLost("LightEngine is closed; start a new one and rebuild the context")
            self._commands.put((call, future))
        return await asyncio.wrap_future(future)

    def _loop(self) -> None:
        while True:
            idle = not self._scheduler.has_work
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                self._scheduler.step()
                continue
            if command is None:
                break
            self._run(*command)
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._end()
                    return
                self._run(*command)
            self._scheduler.step()
        self._end()

    def _run(self, call: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except (EngineError, ValueError) as error:
            future.set_exception(error)

    def _end(self) -> None:
        lost = ContextLost("LightEngine was closed during the call; rebuild the context")
        self._scheduler.abandon(lost)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(lost)

    def _info(self) -> EngineInfo:
        usage = self._scheduler.usage()
        return EngineInfo(
            engine="light",
            mri_version=MRI_VERSION,
            weight_version=usage.weight_version,
            weight_checksum=usage.weight_checksum,
            max_context=self.config.max_context,
            vocab_size=self._vocab_size,
            capabilities=CAPABILITIES,
            num_contexts=usage.num_contexts,
            kv_bytes_used=usage.kv_bytes_used,
            kv_bytes_total=usage.kv_bytes_total,
        )
