"""LightEngine: MRI over our own model, with continuous batching.

One scheduler thread owns contexts, blocks and the model; callers of any thread or event loop put a
command in its queue and await a future. Each turn of the loop drains the queue (new requests join
at every step), packs decode and prefill rows of all running contexts into one batch, and samples.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.constrain.constrainer import Constrainer
from engine.constrain.guide import Guide
from engine.errors import ContextLost, EngineError, NotSupportedError
from engine.light.contexts import ContextTable
from engine.light.scheduler import Scheduler
from engine.light.steps import Call
from engine.light.stream import Stream
from engine.model.config import ModelConfig
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    RewarmPolicy,
    RewarmResult,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)

T = TypeVar("T")
Command = tuple[Callable[[Future[Any]], None], Future[Any]]
log = structlog.get_logger(__name__)


class LightEngine:
    """ModelRuntime in this process. ``close`` ends the thread; open calls get ContextLost.

    A coroutine that is cancelled while it waits leaves nothing running: a new context is released,
    a step is cancelled (what it sampled until then stays in the context, so release that).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        *,
        fetch_weights: Callable[[int | None], WeightSet] | None = None,
        text_of: Callable[[Sequence[int]], str] | None = None,
        vocabulary: Vocabulary | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """``fetch_weights(None)`` gives the newest weights; without it the engine refuses to step
        until ``load_weights``: a restarted engine must never serve random weights.
        ``text_of``: token ids to text, for ``engine.cold_router`` only; ``vocabulary`` does too.
        ``vocabulary``: for requests with stop_texts or a constraint, which are refused without.
        ``on_failure`` is told, on the engine's thread, when a bug or lack of memory ends it."""
        self.config = config or EngineConfig()
        if text_of is None and vocabulary is not None:
            text_of = vocabulary.text
        self._scheduler = Scheduler(model_config, self.config, text_of, vocabulary)
        self._constrainer = (
            None if vocabulary is None else Constrainer(vocabulary, model_config.vocab_size)
        )
        self._vocab_size = model_config.vocab_size
        self._has_experts = model_config.num_moe_layers > 0
        self._is_hybrid = model_config.attention.mode == "hybrid"
        if fetch_weights is not None:
            self._scheduler.load_now(fetch_weights(None))
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._open_calls: set[Future[Any]] = set()
        self._end = ""
        """How the engine ended; empty while it runs."""
        self._lock = threading.Lock()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._main, name="light-engine", daemon=True)
        self._thread.start()

    # -- MRI ------------------------------------------------------------------------------------

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        _check_media(media)
        ctx = ContextId(uuid.uuid4().hex)
        tokens = [int(token) for token in token_ids]
        await self._ask(
            lambda: self._scheduler.contexts.open(ctx, tokens, policy),
            undo=lambda: self._scheduler.release(ctx),
        )
        return ctx

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        _check_media(media)
        tokens = [int(token) for token in token_ids]
        await self._ask(lambda: self._scheduler.contexts.append(ctx, tokens))

    async def forward_step(self, request: StepRequest) -> StepResult:
        made = time.monotonic()
        guide = await self._guide(request)
        return await self._wait(
            lambda future: self._scheduler.begin_step(Call(request, future, made, guide=guide)),
            undo=lambda: self._scheduler.cancel(request.ctx),
        )

    async def stream_step(
        self, request: StepRequest
    ) -> AsyncGenerator[StepDelta | StepResult, None]:
        """Deltas as they come, those that came together as one; then the result. Closing early
        cancels the step."""
        made = time.monotonic()
        guide = await self._guide(request)
        stream = Stream(asyncio.get_running_loop())

        def begin(future: Future[StepResult]) -> None:
            self._scheduler.begin_step(Call(request, future, made, stream.push, guide))

        waiting = asyncio.ensure_future(
            self._wait(begin, undo=lambda: self._scheduler.cancel(request.ctx))
        )
        waiting.add_done_callback(stream.wake)
        try:
            while not waiting.done():
                await stream.wait()
                # the result only after what was pushed before it
                delta = stream.take()
                if delta is not None:
                    yield delta
            delta = stream.take()
            if delta is not None:
                yield delta
            yield await waiting
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])

    async def _guide(self, request: StepRequest) -> Guide | None:
        """The constraint of ``request``, compiled outside of the engine's thread."""
        if request.constraint is None:
            return None
        if self._constrainer is None:
            raise NotSupportedError(
                "constraint: this engine was started without a vocabulary and knows ids only; give "
                "it one (LightEngine(vocabulary=...))"
            )
        return await asyncio.to_thread(self._constrainer.guide, request)

    async def cancel(self, ctx: ContextId) -> None:
        await self._ask(lambda: self._scheduler.cancel(ctx))

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        return await self._ask(lambda: self._scheduler.contexts.summary(ctx))

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        return await self._ask(lambda: self._scheduler.contexts.evict(ctx, selector))

    async def rewarm_kv(
        self,
        ctx: ContextId,
        selector: EvictSelector,
        policy: RewarmPolicy = "wait_complete",
        timeout_s: float = 30.0,
    ) -> RewarmResult:
        return await self._ask(
            lambda: self._scheduler.contexts.rewarm(ctx, selector, policy, timeout_s)
        )

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        child = ContextId(uuid.uuid4().hex)

        def begin(future: Future[None]) -> None:
            self._scheduler.begin_fork(ctx, child, policy, future)

        await self._wait(begin, undo=lambda: self._scheduler.release(child))
        return child

    async def release(self, ctx: ContextId) -> None:
        await self._ask(lambda: self._scheduler.release(ctx))

    async def load_weights(self, weights: WeightSet) -> int:
        return await self._wait(lambda future: self._scheduler.load_weights(weights, future))

    async def info(self) -> EngineInfo:
        return await self._ask(self._info)

    # -- for the engine's owner -----------------------------------------------------------------

    async def on_table(self, call: Callable[[ContextTable], T]) -> T:
        """Run ``call`` on the engine's thread between two batches; see ContextTable."""
        return await self._ask(lambda: call(self._scheduler.contexts))

    def skip_summaries(self, skip: bool) -> None:
        """From the next batch on, see ContextTable; does not wait."""

        def tell(future: Future[None]) -> None:
            future.set_result(self._scheduler.contexts.skip_summaries(skip))

        self._post(tell, _begun())

    async def warm_up(self, rounds: int = 3) -> int:
        """Take, write and give back the free blocks of the cache; see ContextTable."""
        return await self.on_table(lambda table: table.warm_up(rounds))

    # -- thread ---------------------------------------------------------------------------------

    @property
    def thread_ident(self) -> int:
        """Thread that computes; for clocks and profilers."""
        ident = self._thread.ident
        assert ident is not None, "the engine starts its thread in __init__"
        return ident

    @property
    def closed(self) -> bool:
        return bool(self._end)

    def close(self) -> None:
        """Stop the thread and wake every caller with ContextLost. Idempotent."""
        with self._lock:
            if not self._end:
                self._end = "was closed"
                self._commands.put(None)
        self._thread.join()

    async def _ask(self, call: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
        """Run ``call`` on the engine thread and return its value."""
        return await self._wait(lambda future: future.set_result(call()), undo)

    async def _wait(
        self, start: Callable[[Future[T]], None], undo: Callable[[], None] | None = None
    ) -> T:
        """``start`` runs on the engine thread and sees to it that the future is resolved; ``undo``
        follows it when the caller was cancelled meanwhile."""
        future: Future[T] = _begun()
        if not self._post(start, future):
            raise ContextLost(f"LightEngine {self._end}; start a new one and rebuild the context")
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                self._post(lambda undone: undone.set_result(undo()), Future())
            raise

    def _post(self, start: Callable[[Future[Any]], None], future: Future[Any]) -> bool:
        """False when the engine has ended."""
        with self._lock:
            if not self._end:
                self._commands.put((start, future))
            return not self._end

    def _main(self) -> None:
        try:
            self._loop()
        except Exception as error:  # a bug, or no memory: callers must not wait for a dead thread
            log.exception("light_engine_failed")
            with self._lock:
                self._end = f"failed with {type(error).__name__}: {error}"
            self._lose_all()
            if self._on_failure is not None:
                self._on_failure(error)
        else:
            self._lose_all()
        finally:
            self._scheduler.contexts.end()

    def _loop(self) -> None:
        """Until ``close``: run what is in the queue, then one batch; sleep when idle."""
        while True:
            wait = not self._scheduler.has_work
            while wait or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                self._run(*command)
                wait = False
            self._scheduler.step()

    def _run(self, start: Callable[[Future[Any]], None], future: Future[Any]) -> None:
        self._open_calls.add(future)
        future.add_done_callback(self._open_calls.discard)
        try:
            start(future)
        except (EngineError, ValueError) as error:
            future.set_exception(error)

    def _lose_all(self) -> None:
        lost = ContextLost(f"LightEngine {self._end} during the call; rebuild the context")
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                self._open_calls.add(command[1])
        for future in list(self._open_calls):
            future.set_exception(lost)

    def _info(self) -> EngineInfo:
        usage, held = self._scheduler.usage(), self._scheduler.contexts.held_bytes()
        capabilities = {"logprobs", "experts", "fork", "evict", "draws", "kv_summary", "stream"}
        capabilities |= {"sampling", "deadline", "debug"}
        if not self._has_experts:
            capabilities.discard("experts")
        if self._is_hybrid:
            capabilities |= {"tiered", "rewarm"}
        if self.config.deterministic:
            capabilities.add("deterministic")
        if self._constrainer is not None:
            capabilities |= {"stop_texts", "constraints"}
        return EngineInfo(
            engine="light",
            mri_version=MRI_VERSION,
            weight_version=usage.weight_version,
            weight_checksum=usage.weight_checksum,
            max_context=self.config.max_context,
            vocab_size=self._vocab_size,
            capabilities=frozenset(capabilities),
            num_contexts=usage.num_contexts,
            kv_bytes_used=usage.kv_bytes_used,
            kv_bytes_total=usage.kv_bytes_total,
            kv_hot_bytes=held.hot,
            kv_warm_bytes=held.warm,
            kv_cold_bytes=held.cold,
            kv_warm_bf16_bytes=held.warm_bf16,
        )


def _begun() -> Future[Any]:
    """A running future cannot be cancelled, so whoever resolves it later need not check."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _check_media(media: Sequence[Any]) -> None:
    if media:
        raise NotSupportedError(
            f"LightEngine got {len(media)} media items, it serves text only; drop them"
        )
