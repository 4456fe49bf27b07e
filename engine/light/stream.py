"""Stream: tokens of one step on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import structlog

from engine.runtime.types import StepDelta

log = structlog.get_logger(__name__)


class Stream:
    """``push`` on the engine's thread; everything else in the loop. The loop is woken once for all
    tokens that it has not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._deltas: list[StepDelta] = []

    def push(self, delta: StepDelta) -> None:
        with self._lock:
            self._deltas.append(delta)
            is_first = len(self._deltas) == 1
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:  # the loop has ended: nobody is left who waits
                log.info("stream_without_loop")

    def wake(self, _: object = None) -> None:
        self._ready.set()

    async def wait(self) -> None:
        await self._ready.wait()
        self._ready.clear()

    def take(self) -> StepDelta | None:
        with self._lock:
            deltas, self._deltas = self._deltas, []
        return joined(deltas) if deltas else None


def joined(deltas: Sequence[StepDelta]) -> StepDelta:
    """One delta of several, at least one."""
    if len(deltas) == 1:
        return deltas[0]
    tops = [d.top_ids for d in deltas if d.top_ids is not None]
    top_logprobs = [d.top_logprobs for d in deltas if d.top_logprobs is not None]
    return StepDelta(
        np.concatenate([d.token_ids for d in deltas]),
        np.concatenate([d.logprobs for d in deltas]),
        np.concatenate(tops) if tops else None,
        np.concatenate(top_logprobs) if top_logprobs else None,
        deltas[0].weight_version,
    )
