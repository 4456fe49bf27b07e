"""WireRuntime: ModelRuntime over any carrier of verbs; HttpRuntime and TritonRuntime add theirs.

It probes the peer before the first call, copes with MRI 1.0, and refuses calls for one context that
overlap before they leave: on their way they could overtake each other.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from engine.adapters.loop_thread import LoopThread
from engine.adapters.wire import decode, decode_error, encode
from engine.errors import ContextLost, EngineError, InvalidStateError, NotSupportedError
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


@dataclass(slots=True)
class _Use:
    """What runs for a context: the id of its step, and how many forks."""

    step_id: str = ""
    forks: int = 0
    other: bool = False


class WireRuntime(ABC):
    """Callers of any thread and loop may share one. ``close`` releases what is still open."""

    def __init__(self, name: str) -> None:
        self._thread = LoopThread(name)
        self._lock = threading.Lock()
        self._uses: dict[ContextId, _Use] = {}
        """Of the contexts that this client opened and has not released."""
        self._peer = ""
        self._closed = False

    # -- what a carrier does, on the client's own loop ------------------------------------------

    @abstractmethod
    async def _send(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One verb; the peer's typed errors are raised."""

    @abstractmethod
    def _stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The objects of ``MriService.stream``."""

    @abstractmethod
    async def _send_weights(self, weights: WeightSet) -> dict[str, Any]: ...

    @abstractmethod
    async def _probe(self) -> str:
        """The version that the peer speaks."""

    @abstractmethod
    async def _end(self) -> None:
        """Close connections."""

    # -- MRI ------------------------------------------------------------------------------------

    @property
    def peer_version(self) -> str:
        """Empty before the first call."""
        return self._peer

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        _no_media(media)
        body = {"token_ids": [int(token) for token in token_ids], "policy": encode(policy)}
        return self._opened(await self._ask("init_context", body))

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        _no_media(media)
        with self._alone(ctx, "append"):
            await self._ask("append", {"ctx": ctx, "token_ids": [int(t) for t in token_ids]})

    async def forward_step(self, request: StepRequest) -> StepResult:
        step_id = uuid.uuid4().hex
        with self._alone(request.ctx, "forward_step", step_id):
            body = {"request": encode(request), "step_id": step_id}
            return decode(StepResult, await self._ask("forward_step", body))

    async def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]:
        step_id = uuid.uuid4().hex
        body = {"request": encode(request), "step_id": step_id}
        with self._alone(request.ctx, "stream_step", step_id):
            await self._find_version()
            async for item in self._thread.iterate(lambda: self._stream(body)):
                if "error" in item:
                    raise decode_error(item["error"])
                if "result" in item:
                    yield decode(StepResult, item["result"])
                    return
                yield decode(StepDelta, item["delta"])
            raise ContextLost(
                f"stream_step: the stream of context {request.ctx} broke before its end; rebuild it"
            )

    async def cancel(self, ctx: ContextId) -> None:
        with self._lock:
            use = self._uses.get(ctx)
            step_id = use.step_id if use else ""
        # without a step of this client there may be one of another
        await self._ask("cancel", {"ctx": ctx, "step_id": step_id})

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        with self._alone(ctx, "get_kv_summary"):
            return decode(KVSummary, await self._ask("get_kv_summary", {"ctx": ctx}))

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        """``confirmed`` is False from a peer of MRI 1.0, which does not say."""
        with self._alone(ctx, "evict_kv"):
            answer = await self._ask("evict_kv", {"ctx": ctx, "selector": encode(selector)})
        return decode(EvictResult, {"confirmed": False, **answer})

    async def rewarm_kv(
        self,
        ctx: ContextId,
        selector: EvictSelector,
        policy: RewarmPolicy = "wait_complete",
        timeout_s: float = 30.0,
    ) -> RewarmResult:
        body = {
            "ctx": ctx,
            "selector": encode(selector),
            "policy": policy,
            "timeout_s": timeout_s,
        }
        with self._alone(ctx, "rewarm_kv"):
            return decode(RewarmResult, await self._ask("rewarm_kv", body))

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        body = {"ctx": ctx, "policy": None if policy is None else encode(policy)}
        with self._forking(ctx):
            return self._opened(await self._ask("fork", body))

    async def release(self, ctx: ContextId) -> None:
        with self._lock:
            self._uses.pop(ctx, None)
        await self._ask("release", {"ctx": ctx})

    async def load_weights(self, weights: WeightSet) -> int:
        await self._find_version()
        answer = await self._thread.run(self._send_weights(weights))
        return int(answer["weight_version"])

    async def info(self) -> EngineInfo:
        return decode(EngineInfo, await self._ask("info", {}))

    # -- ends -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every context that is open here, then the connections. Idempotent. Not from a
        coroutine of a loop that others wait on: it blocks."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.run_blocking(self._release_all())
        finally:
            self._thread.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    async def _release_all(self) -> None:
        contexts = list(self._uses)
        self._uses.clear()
        try:
            for ctx in contexts:
                await self._send("release", {"ctx": ctx})
        except EngineError as error:
            # a peer that is gone holds nothing; its lease ends what a living one keeps
            log.warning("mri_release_failed", contexts=len(contexts), error=str(error))
        finally:
            await self._end()

    # -- calls ----------------------------------------------------------------------------------

    async def _ask(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._find_version()
        return await self._thread.run(self._send(verb, body))

    async def _find_version(self) -> None:
        if self._peer:
            return
        peer = await self._thread.run(self._probe())
        if peer.split(".")[0] != "1":
            raise NotSupportedError(
                f"the peer speaks MRI {peer[:40]!r}; this client speaks 1.0 and 1.1"
            )
        self._peer = peer

    def _opened(self, answer: Mapping[str, Any]) -> ContextId:
        ctx = ContextId(str(answer["ctx"]))
        with self._lock:
            self._uses[ctx] = _Use()
        return ctx

    @contextmanager
    def _alone(self, ctx: ContextId, action: str, step_id: str = "") -> Iterator[None]:
        """InvalidStateError while another call for ``ctx`` of this client runs."""
        with self._lock:
            # a context that this client does not know is the peer's to judge
            use = self._uses.get(ctx, _Use())
            self._refuse_while(use.step_id or use.other, ctx, action, "a call")
            self._refuse_while(use.forks, ctx, action, "a fork")
            use.step_id, use.other = step_id, True
        try:
            yield
        finally:
            with self._lock:
                use.step_id, use.other = "", False

    @contextmanager
    def _forking(self, ctx: ContextId) -> Iterator[None]:
        """Forks of one parent may overlap."""
        with self._lock:
            use = self._uses.get(ctx, _Use())
            self._refuse_while(use.other, ctx, "fork", "a call")
            use.forks += 1
        try:
            yield
        finally:
            with self._lock:
                use.forks -= 1

    def _refuse_while(self, busy: object, ctx: ContextId, action: str, doing: str) -> None:
        if busy:
            raise InvalidStateError(
                f"{action}: context {ctx} is running {doing}; await it or cancel it first"
            )


def _no_media(media: Sequence[Any]) -> None:
    if media:
        raise NotSupportedError(
            f"{len(media)} media items; media do not cross the wire yet: drop them"
        )
