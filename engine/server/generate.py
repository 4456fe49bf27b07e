"""generate: the answers to one prompt as they are sampled; every context is released at the end,
however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.errors import ContextLost
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
    weight_version: int = -1


@dataclass(frozen=True, slots=True)
class Ended:
    """Choice ``choice`` is complete. ``stop_id``: the id that ended it. ``debug``: StepResult's, of
    the last step."""

    choice: int
    finish: FinishReason
    weight_version: int
    stop_text: str | None = None
    stop_id: int | None = None
    debug: dict[str, Any] | None = None


Event = Piece | Ended
_cleaning: set[asyncio.Task[None]] = set()
"""The loop keeps weak references only."""


async def generate(
    runtime: StreamingRuntime, jobs: Sequence[Job], max_drafts: int = 64
) -> AsyncIterator[Event]:
    """Pieces of all choices as they come, with an Ended behind those of each. Choices count over
    all ``jobs``. Close it (aclosing) to stop."""
    contexts: list[ContextId] = []
    pumps: list[asyncio.Task[None]] = []
    # a slow reader stops the generation, not the memory
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(max_drafts)
    try:
        opened = [await _open(runtime, job, contexts) for job in jobs]
        choices = [
            (job, number, ctx)
            for job, held in zip(jobs, opened, strict=True)
            for number, ctx in enumerate(held)
        ]
        pumps += [
            asyncio.create_task(_pump(_Choice(runtime, job, number, index, ctx, events)))
            for index, (job, number, ctx) in enumerate(choices)
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


async def _open(runtime: ModelRuntime, job: Job, contexts: list[ContextId]) -> list[ContextId]:
    """One context a choice: the prompt is computed once, the others are forks. ``contexts`` gets
    each as soon as it exists, so that none is forgotten."""
    first = await runtime.init_context(job.prompt_ids, job.policy)
    contexts.append(first)
    own = [first]

    async def fork() -> None:
        child = await runtime.fork(first)
        contexts.append(child)
        own.append(child)

    forks = [fork() for _ in range(job.choices - 1)]
    for error in await asyncio.gather(*forks, return_exceptions=True):
        if error is not None:
            raise error
    return own


@dataclass(frozen=True, slots=True)
class _Choice:
    """``number`` within its job, ``index`` within the request."""

    runtime: StreamingRuntime
    job: Job
    number: int
    index: int
    ctx: ContextId
    events: asyncio.Queue[Event | Exception]


async def _pump(choice: _Choice) -> None:
    try:
        await choice.events.put(await _run(choice))
    except Exception as error:  # the reader raises it
        await choice.events.put(error)


async def _run(choice: _Choice) -> Ended:
    job, loop = choice.job, asyncio.get_running_loop()
    left = job.max_tokens
    deadline = None if job.deadline_s is None else loop.time() + job.deadline_s
    for number, phase in enumerate(job.phases, start=1):
        request = StepRequest(
            choice.ctx,
            left,
            job.sampling_of(phase, choice.number),
            phase.stop_ids,
            stop_texts=job.stop_texts,
            constraint=phase.constraint,
            num_logprobs=job.num_logprobs,
            deadline_s=None if deadline is None else max(0.001, deadline - loop.time()),
            debug=job.debug,
        )
        result = await _stream(choice, request)
        left -= len(result.token_ids)
        stopped = result.finish == "stop" and result.stop_text is None
        stop_id = int(result.token_ids[-1]) if stopped else None
        if number == len(job.phases) or not left or stop_id != job.think_end:
            return Ended(
                choice.index,
                result.finish,
                result.weight_version,
                result.stop_text,
                stop_id,
                result.debug,
            )
    raise AssertionError("the last phase returns")


async def _stream(choice: _Choice, request: StepRequest) -> StepResult:
    items: Any = choice.runtime.stream_step(request)
    async with aclosing(items):
        async for item in items:
            if isinstance(item, StepResult):
                return item
            await choice.events.put(
                Piece(
                    choice.index,
                    item.token_ids.tolist(),
                    item.logprobs,
                    item.top_ids,
                    item.top_logprobs,
                    item.weight_version,
                )
            )
    raise AssertionError("a stream of a step ends with its StepResult")


async def _clean(
    runtime: ModelRuntime, contexts: list[ContextId], pumps: list[asyncio.Task[None]]
) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    # an engine that has ended holds nothing
    with suppress(ContextLost):
        for ctx in contexts:
            await runtime.release(ctx)
