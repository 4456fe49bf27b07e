"""generate: the answers to one prompt as they are sampled; every context is released at the end,
however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextId, FinishReason, StepDelta, StepRequest, StepResult
from engine.server.job import Job


class StreamingRuntime(ModelRuntime, Protocol):
    """An engine with the capability "stream"."""

    def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of choice ``choice``."""

    choice: int
    token_ids: list[int]
    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Ended:
    """Choice ``choice`` is complete. ``stop_id``: the id that ended it."""

    choice: int
    finish: FinishReason
    weight_version: int
    stop_text: str | None = None
    stop_id: int | None = None


Event = Piece | Ended
_cleaning: set[asyncio.Task[None]] = set()
"""The loop keeps weak references only."""


async def generate(
    runtime: StreamingRuntime, job: Job, max_drafts: int = 64
) -> AsyncIterator[Event]:
    """Pieces of all choices as they come, then an Ended for each. Close it (aclosing) to stop."""
    contexts: list[ContextId] = []
    pumps: list[asyncio.Task[None]] = []
    # a slow reader stops the generation, not the memory
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(max_drafts)
    try:
        await _open(runtime, job, contexts)
        pumps += [
            asyncio.create_task(_pump(runtime, job, choice, ctx, events))
            for choice, ctx in enumerate(contexts)
        ]
        running = len(pumps)
        while running:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            running -= isinstance(event, Ended)
            yield event
    finally:
        cleanup = asyncio.create_task(_clean(runtime, contexts, pumps))
        _cleaning.add(cleanup)
        cleanup.add_done_callback(_cleaning.discard)
        # whoever is cancelled here leaves the work to the task
        await asyncio.shield(cleanup)


async def _open(runtime: ModelRuntime, job: Job, contexts: list[ContextId]) -> None:
    """One context a choice: the prompt is computed once, the others are forks."""
    first = await runtime.init_context(job.prompt_ids, job.policy)
    contexts.append(first)

    async def fork() -> None:
        contexts.append(await runtime.fork(first))

    forks = [fork() for _ in range(job.choices - 1)]
    done = await asyncio.gather(*forks, return_exceptions=True)
    for error in done:
        if error is not None:
            raise error


async def _pump(
    runtime: StreamingRuntime,
    job: Job,
    choice: int,
    ctx: ContextId,
    events: asyncio.Queue[Event | Exception],
) -> None:
    try:
        await _run_choice(runtime, job, choice, ctx, events)
    except Exception as error:  # the reader raises it
        await events.put(error)


async def _run_choice(
    runtime: StreamingRuntime,
    job: Job,
    choice: int,
    ctx: ContextId,
    events: asyncio.Queue[Event | Exception],
) -> None:
    left, loop = job.max_tokens, asyncio.get_running_loop()
    deadline = None if job.deadline_s is None else loop.time() + job.deadline_s
    for number, phase in enumerate(job.phases, start=1):
        request = StepRequest(
            ctx,
            left,
            job.sampling_of(phase, choice),
            phase.stop_ids,
            stop_texts=job.stop_texts,
            constraint=phase.constraint,
            num_logprobs=job.num_logprobs,
            deadline_s=None if deadline is None else max(0.001, deadline - loop.time()),
        )
        result = await _stream(runtime, request, choice, events)
        left -= len(result.token_ids)
        stop_id = int(result.token_ids[-1]) if len(result.token_ids) else None
        stopped = result.finish == "stop" and result.stop_text is None
        if number < len(job.phases) and left and stopped and stop_id == job.think_end:
            continue
        await events.put(
            Ended(
                choice,
                result.finish,
                result.weight_version,
                result.stop_text,
                stop_id if stopped else None,
            )
        )
        return


async def _stream(
    runtime: StreamingRuntime,
    request: StepRequest,
    choice: int,
    events: asyncio.Queue[Event | Exception],
) -> StepResult:
    items: Any = runtime.stream_step(request)
    async with aclosing(items):
        async for item in items:
            if isinstance(item, StepResult):
                return item
            piece = Piece(
                choice, item.token_ids.tolist(), item.logprobs, item.top_ids, item.top_logprobs
            )
            await events.put(piece)
    raise AssertionError("a stream of a step ends with its StepResult")


async def _clean(
    runtime: ModelRuntime, contexts: list[ContextId], pumps: list[asyncio.Task[None]]
) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    for ctx in contexts:
        await runtime.release(ctx)
