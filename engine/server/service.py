"""Service: the engine that is served, what its answers are made with, and its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from engine.chat.base import Tokenizer
from engine.chat.vocabulary import Vocabulary
from engine.errors import ContextLost, NotSupportedError
from engine.server.config import ServeConfig
from engine.server.errors import ModelNotFound, NotReady
from engine.server.format import ChatFormat
from engine.server.generate import Event, StreamingRuntime, generate
from engine.server.job import Job, Server
from engine.server.keys import Keys
from engine.server.metrics import ServerMetrics

Status = Literal["loading", "ok", "draining"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine with weights, and the text side of its model. ``close`` ends the engine;
    ``gauges``: more numbers for /metrics, by name without ``k25_``; ``warm_up``: of the engine,
    before its first request; ``watch`` runs beside the server until it is cancelled."""

    runtime: StreamingRuntime
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat: ChatFormat | None
    close: Callable[[], None]
    gauges: Callable[[], Mapping[str, float]] = dict
    warm_up: Callable[[], Awaitable[object]] | None = None
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None


class Service:
    """One a server. ``start`` when weights are there; until then every request is NotReady."""

    def __init__(self, config: ServeConfig, keys: Keys) -> None:
        self.config = config
        self.keys = keys
        self.metrics = ServerMetrics()
        self.status: Status = "loading"
        self.created = int(time.time())
        self.num_running = 0
        self._loaded: Loaded | None = None
        self._server: Server | None = None
        self._engine_name = ""
        self._watch: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> Loaded:
        """NotReady before ``start``."""
        if self._loaded is None:
            raise NotReady("the model is being loaded; come back in a moment")
        return self._loaded

    @property
    def runtime(self) -> StreamingRuntime:
        return self.loaded.runtime

    @property
    def server(self) -> Server:
        """What jobs are made with; NotReady before ``start``."""
        if self._server is None:
            raise NotReady("the model is being loaded; come back in a moment")
        return self._server

    async def start(self, loaded: Loaded) -> None:
        """Warm up, then take requests. NotSupportedError for an engine that cannot stream."""
        info = await loaded.runtime.info()
        if "stream" not in info.capabilities:
            raise NotSupportedError(
                f"engine {info.engine} has no capability stream; the server needs one that has "
                f"(it has {', '.join(sorted(info.capabilities)) or 'none'})"
            )
        self._engine_name = info.engine
        self._server = Server(
            tokenizer=loaded.tokenizer,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            chat=loaded.chat,
            limits=self.config.limits,
            answer=self.config.answer,
        )
        await self._warm_up(loaded, info.max_context)
        if loaded.watch is not None:
            self._watch = asyncio.create_task(loaded.watch())
        self._loaded = loaded
        if self.status == "loading":
            self.status = "ok"

    async def _warm_up(self, loaded: Loaded, max_context: int) -> None:
        """Two answers to one prompt, so that prefill, fork, decode and sampling have all run."""
        from engine.runtime.types import ContextPolicy, Sampling
        from engine.server.job import Phase

        if loaded.warm_up is not None:
            await loaded.warm_up()
        prompt = tuple(loaded.tokenizer.encode("warm up"))[: max(1, max_context - 1)]
        tokens = min(self.config.warm_up_tokens, max_context - len(prompt))
        phases = (Phase(Sampling(seed=0), ()),)
        job = Job(prompt, 2, tokens, phases, ContextPolicy())
        async for _ in generate(loaded.runtime, [job]):
            pass

    def drain(self) -> None:
        """No new requests; running ones go on."""
        self.status = "draining"

    def close(self) -> None:
        """End the engine; open requests get ContextLost."""
        if self._watch is not None and not self._watch.done():
            self._watch.cancel()
        if self._loaded is not None:
            self._loaded.close()

    def check_model(self, name: str) -> None:
        """ModelNotFound unless it is what is served."""
        known = (self.config.name, *self.config.model.aliases)
        if name not in known:
            raise ModelNotFound(
                f"model {name!r} is not served here; this server has {', '.join(known)}"
            )

    def fingerprint(self, weight_version: int) -> str:
        """``system_fingerprint``: equal ones answer equal seeds alike."""
        return f"parl-{self._engine_name}-w{weight_version}"

    def events(self, jobs: Sequence[Job], began: float) -> AsyncIterator[Event]:
        """The answers to all jobs of a request, measured. Close it (aclosing)."""
        events = generate(self.runtime, jobs, self.config.limits.max_drafts)
        return self.metrics.timed(events, jobs, began)

    async def exposition(self) -> bytes:
        """Prometheus' text."""
        if self._loaded is None:
            return self.metrics.exposition(None, {})
        info = None
        # what was counted outlives the engine
        with suppress(ContextLost):
            info = await self._loaded.runtime.info()
        return self.metrics.exposition(info, self._loaded.gauges())
