"""Ray shells of the engine: EngineActor holds a LightEngine, RemoteRuntime is MRI over its handle.

Thousands of small calls cross here, and a Ray call costs more than a token. So a client never calls
one by one: what its event loop asks for in one turn leaves as one message, and one waiting message
brings back whatever is ready. An observation travels with the step that follows it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import ray
import structlog
import torch
from ray.exceptions import RayError, RayTaskError

from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.errors import ContextLost, DeadlineExceeded, EngineError
from engine.light.engine import LightEngine
from engine.light.stream import joined
from engine.mailbox import Answer, Call, Client, Mailbox
from engine.model.config import ModelConfig
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

log = structlog.get_logger(__name__)

NO_REPLY = -1
MAX_MESSAGES = 1000
"""Of all clients at once; each has one exchange waiting, the others are short."""
RECOVERY_S = 60.0
"""How long callers wait for an engine that died before their contexts count as lost."""
DEADLINE_S = 900.0
"""How long a call to a living engine may take: longer than any step, shorter than a night."""
_PAUSE_S = 0.1


class EngineActor:
    """Runs as an async Ray actor with ``max_restarts=-1, max_task_retries=0``.

    A restarted engine fetches the newest weights before it answers anybody; a retried call would
    only meet contexts that are gone.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        fetch_weights: Callable[[], WeightSet | None] | None = None,
        announce: Callable[[int], None] | None = None,
        num_threads: int = 1,
        text_of: Callable[[Sequence[int]], str] | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """``fetch_weights()`` None = nothing was published yet: no step before ``load_weights``.
        ``announce(pid)`` is called once the engine can answer. ``text_of``: see LightEngine."""
        torch.set_num_threads(num_threads)
        weights = None if fetch_weights is None else fetch_weights()
        self._engine = LightEngine(
            model,
            config,
            fetch_weights=None if weights is None else lambda _: weights,
            text_of=text_of,
            vocabulary=vocabulary,
            on_failure=_end_process,
        )
        self._mailboxes: dict[Client, Mailbox] = {}
        if announce is not None:
            announce(os.getpid())

    async def ping(self) -> str:
        return "pong"

    async def load_weights(self, weights: WeightSet) -> int:
        """Pass an ObjectRef: Ray hands the value in."""
        return await self._engine.load_weights(weights)

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def submit(self, client: Client, calls: Sequence[Call]) -> None:
        """Start ``calls``; their answers come with an ``exchange``."""
        mailbox = self._mailboxes.get(client) or await self._welcome(client)
        for call in calls:
            task = asyncio.get_running_loop().create_task(self._run(mailbox, call))
            mailbox.running.add(task)
            task.add_done_callback(mailbox.running.discard)

    async def exchange(self, client: Client, calls: Sequence[Call]) -> list[Answer]:
        """Start ``calls``, then wait until this client has at least one answer; returns all."""
        await self.submit(client, calls)
        mailbox = self._mailboxes[client]
        await mailbox.ready.wait()
        mailbox.ready.clear()
        answers, mailbox.answers = mailbox.answers, []
        return answers

    async def _welcome(self, client: Client) -> Mailbox:
        """A new client; what an earlier process of the same name held is freed."""
        mailbox = self._mailboxes[client] = Mailbox()
        for old in [key for key in self._mailboxes if key[0] == client[0] and key != client]:
            dead = self._mailboxes.pop(old)
            log.info("engine_client_replaced", client=client[0], contexts=len(dead.contexts))
            for task in list(dead.running):
                task.cancel()
            for ctx in dead.contexts:
                await self._engine.cancel(ctx)
                await self._engine.release(ctx)
        return mailbox

    async def _run(self, mailbox: Mailbox, call: Call) -> None:
        call_id, verb, arguments = call
        answer: Answer
        try:
            value: Any
            if verb == "stream":
                value = await self._stream(mailbox, call_id, *arguments)
            else:
                value = await self._verb(verb, arguments)
            answer = (call_id, value, None)
            if verb in ("init_context", "fork"):
                mailbox.contexts.add(value)
            elif verb == "release":
                mailbox.contexts.discard(arguments[0])
        except (EngineError, ValueError) as error:
            answer = (call_id, None, error)
        except Exception as error:  # a bug: the caller must hear of it, or it waits for ever
            log.exception("engine_call_failed", verb=verb)
            answer = (call_id, None, EngineError(f"{verb}: {_one_line(error)}; a bug, see the log"))
        if call_id != NO_REPLY:
            mailbox.answers.append(answer)
            mailbox.ready.set()

    async def _stream(
        self, mailbox: Mailbox, call_id: int, observed: list[int], request: StepRequest
    ) -> StepResult:
        """Deltas are answers like any other: those that are ready travel in one message."""
        if observed:
            await self._engine.append(request.ctx, observed)
        async for part in self._engine.stream_step(request):
            if isinstance(part, StepResult):
                return part
            mailbox.answers.append((call_id, part, None))
            mailbox.ready.set()
        raise EngineError("stream_step ended without a result; a bug")

    async def _verb(self, verb: str, arguments: tuple[Any, ...]) -> Any:
        match verb, arguments:
            case "init_context", (token_ids, policy):
                return await self._engine.init_context(token_ids, policy)
            case "fork", (ctx, policy):
                return await self._engine.fork(ctx, policy)
            case "step", (observed, request):
                if observed:
                    await self._engine.append(request.ctx, observed)
                return await self._engine.forward_step(request)
            case "append", (ctx, token_ids):
                return await self._engine.append(ctx, token_ids)
            case "cancel", (ctx,):
                return await self._engine.cancel(ctx)
            case "release", (ctx,):
                return await self._engine.release(ctx)
            case "get_kv_summary", (ctx,):
                return await self._engine.get_kv_summary(ctx)
            case "evict_kv", (ctx, selector):
                return await self._engine.evict_kv(ctx, selector)
            case "rewarm_kv", (ctx, selector, policy, timeout_s):
                return await self._engine.rewarm_kv(ctx, selector, policy, timeout_s)
            case "info", ():
                return await self._engine.info()
        raise EngineError(f"verb {verb!r} with {len(arguments)} arguments; expected one of MRI's")


def _end_process(error: Exception) -> None:
    """A broken engine would answer nobody: end, and Ray starts a new one with fresh weights."""
    log.error("engine_failed", error=f"{type(error).__name__}: {error}")
    os._exit(1)


def start_engine(
    model: ModelConfig,
    config: EngineConfig,
    *,
    name: str,
    num_cpus: float,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Start a named EngineActor; ``arguments`` are its keyword arguments. Keep the handle."""
    actor = ray.remote(max_restarts=-1, max_task_retries=0)(EngineActor)
    chosen: Any = actor.options(
        name=name, num_cpus=num_cpus, max_concurrency=MAX_MESSAGES, **(options or {})
    )
    return chosen.remote(model, config, **arguments)


class RemoteRuntime:
    """ModelRuntime over an EngineActor. Belongs to one event loop.

    When the actor dies every open call waits until Ray has brought it back (at most ``recovery_s``)
    and then gets ContextLost, so that callers rebuild against a living engine. A call that a living
    engine does not answer within ``timeout_s`` is an EngineError. As with LightEngine, a caller
    that is cancelled leaves nothing running.
    """

    def __init__(
        self,
        actor: Any,
        name: str = "",
        recovery_s: float = RECOVERY_S,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        """``name``: of the process, the same after its restart; empty = one of its own."""
        self._actor = actor
        self._recovery_s = recovery_s
        self._timeout_s = timeout_s
        incarnation = uuid.uuid4().hex
        self._client: Client = (name or incarnation, incarnation)
        self._ids = itertools.count()
        self._outbox: list[Call] = []
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[StepDelta | None]] = {}
        """Deltas of streamed steps; None = the call has ended."""
        self._orphans: set[int] = set()
        """Calls that open a context nobody waits for any more."""
        self._observed: dict[ContextId, list[int]] = {}
        self._flush_planned = False
        self._pump: asyncio.Task[None] | None = None
        self._down = False

    # -- MRI ------------------------------------------------------------------------------------

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        self._no_media(media)
        return await self._ask("init_context", [int(token) for token in token_ids], policy)

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        """Travels with the next call for ``ctx``, which also reports its errors."""
        self._no_media(media)
        self._observed.setdefault(ctx, []).extend(int(token) for token in token_ids)

    async def forward_step(self, request: StepRequest) -> StepResult:
        return await self._ask("step", self._observed.pop(request.ctx, []), request)

    async def stream_step(
        self, request: StepRequest
    ) -> AsyncGenerator[StepDelta | StepResult, None]:
        """Deltas as they come, those that came together as one; then the result. Closing early
        cancels the step. Waits at most ``timeout_s`` for the next part."""
        arguments = (self._observed.pop(request.ctx, []), request)
        call_id, future = self._begin("stream", arguments)
        parts = self._streams[call_id] = asyncio.Queue()
        future.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    ready = [await parts.get()]
                while not parts.empty():
                    ready.append(parts.get_nowait())
                deltas = [delta for delta in ready if delta is not None]
                if deltas:
                    yield joined(deltas)
                if future.done():
                    break
            yield future.result()
        except DeadlineExceeded:
            raise  # the engine's own answer, which is a TimeoutError too
        except TimeoutError:
            raise self._late("stream_step") from None
        finally:
            if not future.done():
                self._abandon(call_id, "stream", arguments)
            self._pending.pop(call_id, None)
            del self._streams[call_id]

    async def cancel(self, ctx: ContextId) -> None:
        await self._ask("cancel", ctx)

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        await self._send_observed(ctx)
        return await self._ask("get_kv_summary", ctx)

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        await self._send_observed(ctx)
        return await self._ask("evict_kv", ctx, selector)

    async def rewarm_kv(
        self,
        ctx: ContextId,
        selector: EvictSelector,
        policy: RewarmPolicy = "wait_complete",
        timeout_s: float = 30.0,
    ) -> RewarmResult:
        """As LightEngine's; ``timeout_s`` is of the policy timeout, the call has its own."""
        await self._send_observed(ctx)
        return await self._ask("rewarm_kv", ctx, selector, policy, timeout_s)

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        await self._send_observed(ctx)
        return await self._ask("fork", ctx, policy)

    async def release(self, ctx: ContextId) -> None:
        """Sent, not awaited: releasing cannot fail, and a dead engine has nothing to free."""
        self._observed.pop(ctx, None)
        self._post((NO_REPLY, "release", (ctx,)))

    async def load_weights(self, weights: WeightSet) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._actor.load_weights.remote(weights)
        except TimeoutError:
            raise self._late("load_weights") from None
        except RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from None
            raise EngineError(f"load_weights: {_one_line(error)}; see the engine's log") from error
        except RayError as error:
            raise ContextLost(
                f"load_weights: the engine died ({type(error).__name__}); it fetches the newest "
                "weights when it starts again"
            ) from error

    async def info(self) -> EngineInfo:
        return await self._ask("info")

    # -- messages -------------------------------------------------------------------------------

    def _no_media(self, media: Sequence[Any]) -> None:
        if media:
            raise ValueError(f"{len(media)} media items; this engine serves text only: drop them")

    async def _send_observed(self, ctx: ContextId) -> None:
        observed = self._observed.pop(ctx, None)
        if observed:
            await self._ask("append", ctx, observed)

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        call_id, future = self._begin(verb, arguments)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except DeadlineExceeded:
            raise  # the engine's own answer, which is a TimeoutError too
        except TimeoutError:
            self._abandon(call_id, verb, arguments)
            raise self._late(verb) from None
        except asyncio.CancelledError:
            self._abandon(call_id, verb, arguments)
            raise
        finally:
            self._pending.pop(call_id, None)

    def _begin(self, verb: str, arguments: tuple[Any, ...]) -> tuple[int, asyncio.Future[Any]]:
        call_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        self._post((call_id, verb, arguments))
        return call_id, future

    def _late(self, verb: str) -> EngineError:
        return EngineError(
            f"{verb}: client {self._client[0]} waited {self._timeout_s:g} s for its engine actor, "
            "which lives but does not answer; see its log or raise timeout_s"
        )

    def _abandon(self, call_id: int, verb: str, arguments: tuple[Any, ...]) -> None:
        """End what the engine does for a caller that left."""
        if verb in ("step", "stream"):
            self._post((NO_REPLY, "cancel", (arguments[1].ctx,)))
        elif verb in ("init_context", "fork"):
            self._orphans.add(call_id)

    def _post(self, call: Call) -> None:
        self._outbox.append(call)
        if not self._flush_planned:
            self._flush_planned = True
            # after every coroutine of this turn of the loop has asked for what it needs
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._down or not self._outbox:
            return  # sent after recovery
        waiting = self._pending or self._orphans
        if waiting and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._run_pump())
            return
        calls, self._outbox = self._outbox, []
        # an error of this message is an error of the exchange that waits beside it
        self._actor.submit.remote(self._client, calls)

    async def _run_pump(self) -> None:
        """One exchange after the other while somebody waits for an answer."""
        while self._pending or self._orphans:
            calls, self._outbox = self._outbox, []
            try:
                answers = await self._actor.exchange.remote(self._client, calls)
            except RayTaskError as error:  # the engine lives, its shell has a bug
                self._fail_all(EngineError(f"engine actor: {_one_line(error)}; see its log"))
                continue
            except RayError as error:
                await self._recover(error)
                continue
            for call_id, value, failure in answers:
                if isinstance(value, StepDelta):
                    if call_id in self._streams:  # else its caller closed the stream
                        self._streams[call_id].put_nowait(value)
                    continue
                if call_id in self._orphans:
                    self._orphans.discard(call_id)
                    if failure is None:
                        self._post((NO_REPLY, "release", (value,)))
                future = self._pending.pop(call_id, None)
                if future is None or future.done():
                    continue  # its caller was cancelled
                if failure is None:
                    future.set_result(value)
                else:
                    future.set_exception(failure)
            # let the woken coroutines ask again before the next message leaves
            await asyncio.sleep(0)

    async def _recover(self, error: RayError) -> None:
        """Wait for the actor, then tell every caller that its context is gone."""
        self._down = True
        started = time.monotonic()
        reason = f"the engine died ({type(error).__name__})"
        log.warning("engine_lost", client=self._client[0], waiting=len(self._pending))
        while not await self._answers():
            if time.monotonic() - started > self._recovery_s:
                reason = f"the engine died and did not come back in {self._recovery_s:g} s"
                break
            await asyncio.sleep(_PAUSE_S)
        self._down = False
        self._outbox.clear()
        self._observed.clear()
        self._fail_all(ContextLost(f"{reason}; rebuild the context"))
        log.info("engine_back", client=self._client[0], after_s=time.monotonic() - started)

    def _fail_all(self, error: EngineError) -> None:
        self._orphans.clear()
        failed, self._pending = self._pending, {}
        for future in failed.values():
            if not future.done():
                future.set_exception(error)

    async def _answers(self) -> bool:
        ping: Coroutine[Any, Any, str] = _get(self._actor.ping.remote())
        try:
            await asyncio.wait_for(ping, timeout=self._recovery_s)
        except (RayError, TimeoutError):
            return False
        return True


async def _get(ref: Any) -> Any:
    return await ref


def _one_line(error: BaseException) -> str:
    """Kind and last line: Ray puts the cause of a task's error at the end of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
