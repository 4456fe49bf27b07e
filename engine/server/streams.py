"""Answers to clients that may go away: work ends with its connection, streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError, ErrorAnswer, answer_to
from engine.server.gate import record_of
from infra.errors import ParlError

T = TypeVar("T")
Chunk = Mapping[str, Any]
log = structlog.get_logger(__name__)
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream"


class ClientGone(ApiError):
    """Nobody waits for the answer any more."""

    status, code = 499, "client_gone"


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; ClientGone, after it was cancelled, when the client leaves first."""
    return await _race(request.receive, work)


async def _race(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """Chunks as server-sent events, then [DONE]. An error after the first chunk is an event of its
    own, in OpenAI's shape, and the last one."""

    def __init__(
        self,
        first: Sequence[Chunk],
        rest: AsyncIterator[Chunk],
        headers: Mapping[str, str],
    ) -> None:
        # no proxy may collect the events
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=EVENT_STREAM, headers={**headers, **fixed})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closing: Any = self._rest
        try:
            async with aclosing(closing):
                await _race(receive, self._send(scope, send))
        except ClientGone:
            record_of(scope).outcome = "client_gone"

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def event(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        for chunk in self._first:
            await event(_event(chunk))
        try:
            async for chunk in self._rest:
                await event(_event(chunk))
        except ParlError as error:
            record = record_of(scope)
            answer = answer_to(error)
            record.outcome = "error" if answer.status == 500 else "unavailable"
            log.warning("stream_failed", request_id=record.id, error=str(error))
            await event(_event(answer.body()))
        except Exception as error:
            # the status is on the wire already; the client must still learn that this is no end
            record = record_of(scope)
            record.outcome = "error"
            log.exception("stream_failed", request_id=record.id)
            text = f"{type(error).__name__} in the server; see its log"
            await event(_event(ErrorAnswer(500, text, "server_error", None, "internal").body()))
        await event(DONE, more=False)


def _event(chunk: Chunk) -> bytes:
    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"
