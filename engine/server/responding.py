"""respond: one request answered, whole or as a stream, from the same events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from engine.server.gate import Record, record_of
from engine.server.generate import Ended, Event, Piece
from engine.server.job import Job
from engine.server.service import Service
from engine.server.streams import Chunk, ClientGone, EventStream, until_gone


class Answering(Protocol):
    """Makes an answer of events; ``take`` gives the chunks that a stream says."""

    fingerprint: str

    def first(self) -> list[Chunk]:
        """Before any event."""
        ...

    def take(self, event: Event) -> list[Chunk]: ...

    def usage(self) -> dict[str, int]: ...

    def usage_chunk(self) -> Chunk:
        """The last one, where the request asked for it."""
        ...

    def body(self) -> dict[str, Any]:
        """The whole answer, when all choices have ended."""
        ...


async def respond(
    service: Service,
    request: Request,
    answering: Answering,
    jobs: Sequence[Job],
    *,
    stream: bool,
    with_usage: bool,
) -> Response:
    """Errors before the first token are raised; later ones end the stream."""
    record = record_of(request.scope)
    events = service.events(jobs, record.began)
    try:
        if stream:
            return await _stream(service, request, answering, events, record, with_usage)
        body, versions = await until_gone(request, _whole(service, answering, events, record))
    except ClientGone:
        record.outcome = "client_gone"
        return Response(status_code=499)
    return JSONResponse(body, headers=_headers(versions))


async def _whole(
    service: Service, answering: Answering, events: AsyncIterator[Event], record: Record
) -> tuple[dict[str, Any], list[int]]:
    versions: set[int] = set()
    closing: Any = events
    async with aclosing(closing):
        async for event in closing:
            if isinstance(event, Ended):
                versions.add(event.weight_version)
                answering.fingerprint = service.fingerprint(event.weight_version)
            answering.take(event)
    record.values |= {**answering.usage(), "weight_version": _told(sorted(versions))}
    return answering.body(), sorted(versions)


async def _stream(
    service: Service,
    request: Request,
    answering: Answering,
    events: AsyncIterator[Event],
    record: Record,
    with_usage: bool,
) -> Response:
    closing: Any = events
    first = await until_gone(request, anext(closing))
    version = first.weight_version
    if isinstance(first, Piece) and version < 0:
        version = (await service.runtime.info()).weight_version
    answering.fingerprint = service.fingerprint(version)
    record.values["weight_version"] = version

    async def chunks() -> AsyncIterator[Chunk]:
        async with aclosing(closing):
            for chunk in answering.take(first):
                yield chunk
            async for event in closing:
                for chunk in answering.take(event):
                    yield chunk
        if with_usage:
            yield answering.usage_chunk()
        record.values |= answering.usage()

    return EventStream(answering.first(), chunks(), _headers([version]))


def _headers(versions: Sequence[int]) -> dict[str, str]:
    return {"X-Weight-Version": _told(versions)}


def _told(versions: Sequence[int]) -> str:
    """Several only where the choices of one request began on both sides of an update."""
    return ",".join(map(str, versions))
