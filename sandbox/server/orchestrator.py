"""The orchestrator door: make sessions, look at them, judge and close them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response, Security
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer

from sandbox.server import tokens
from sandbox.server.door import IdempotencyKey, errors, guarded, json_errors
from sandbox.server.errors import TooSlow, Unauthorized
from sandbox.server.live import LiveSession
from sandbox.server.service import SandboxService
from sandbox.server.wire import (
    AsciiJSON,
    CreatedBody,
    CreateSession,
    PoolStatus,
    SessionBody,
    SessionList,
    VerdictBody,
    VerifySession,
    verdict_body,
)

PREFIX = "/orchestrator"
SessionId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$")]
Offset = Annotated[int, Query(ge=0, le=10**6)]
Limit = Annotated[int, Query(ge=1, le=200)]
_SCHEME = HTTPBearer(scheme_name="orchestrator", auto_error=False)


def orchestrator_router(service: SandboxService, token_digest: str) -> APIRouter:
    """Every route needs the server's token."""

    def authorise(_request: Request, token: str) -> None:
        if not tokens.same(token, token_digest):
            raise Unauthorized("the token is not this server's")

    router = APIRouter(
        prefix=PREFIX,
        tags=["orchestrator"],
        route_class=guarded(authorise),
        dependencies=[Security(_SCHEME)],
        default_response_class=AsciiJSON,
        responses=errors(401, 500),
    )
    _add_sessions(router, service)
    _add_closed(router, service)
    _add_verdicts(router, service)
    _add_status(router, service)
    return router


def _finder(service: SandboxService) -> Any:
    """Dependency: the session named in the path."""

    def find(session_id: SessionId) -> LiveSession:
        return service.find(session_id)

    return Depends(find)


def _add_sessions(router: APIRouter, service: SandboxService) -> None:
    found = _finder(service)

    @router.post(
        "/sessions",
        status_code=201,
        response_model=CreatedBody,
        responses=errors(400, 404, 408, 409, 413, 422, 429, 502, 503),
        summary="Create a session; its world is set up when this answers.",
    )
    async def create_session(
        body: CreateSession, idempotency_key: IdempotencyKey = None
    ) -> Response:
        live, repeated = await service.create(body, idempotency_key)
        content = {"agent_token": live.agent_token, "session": live.describe()}
        headers = {"Idempotency-Replayed": "true"} if repeated else None
        return AsciiJSON(content, status_code=201, headers=headers)

    @router.get(
        "/sessions",
        response_model=SessionList,
        responses=errors(422),
        summary="Open sessions, newest first.",
    )
    async def list_sessions(offset: Offset = 0, limit: Limit = 50) -> Response:
        return _page(service.sessions(closed=False), offset, limit)

    @router.get(
        "/sessions/{session_id}",
        response_model=SessionBody,
        responses=errors(404, 422),
        summary="State, isolation, enforced limits, repairs and loop verdicts.",
    )
    async def inspect_session(live: LiveSession = found) -> Response:
        return AsciiJSON(live.describe())


def _add_closed(router: APIRouter, service: SandboxService) -> None:
    @router.get(
        "/closed",
        response_model=SessionList,
        responses=errors(422),
        summary="Sessions closed not long ago, newest first.",
    )
    async def list_closed(offset: Offset = 0, limit: Limit = 50) -> Response:
        return _page(service.sessions(closed=True), offset, limit)

    @router.get(
        "/closed/{session_id}",
        response_model=SessionBody,
        responses=errors(404, 422),
        summary="What became of a session, and why it was closed.",
    )
    async def inspect_closed(session_id: SessionId) -> Response:
        return AsciiJSON(service.find_closed(session_id).describe())


def _page(found: list[LiveSession], offset: int, limit: int) -> Response:
    page = [live.describe() for live in found[offset : offset + limit]]
    return AsciiJSON({"sessions": page, "total": len(found)})


def _add_verdicts(router: APIRouter, service: SandboxService) -> None:
    found = _finder(service)

    @router.post(
        "/sessions/{session_id}/verify",
        response_model=VerdictBody,
        responses=errors(400, 404, 408, 409, 413, 422, 502, 503),
        summary="Judge end state and final answer; again with the same text: the same verdict.",
    )
    async def verify_session(body: VerifySession, live: LiveSession = found) -> Response:
        return AsciiJSON(verdict_body(await service.verify(live, body.final_text)))

    @router.delete(
        "/sessions/{session_id}",
        response_model=SessionBody,
        responses=errors(404, 422, 504),
        summary="Close the session; its token opens nothing from here on.",
    )
    async def close_session(live: LiveSession = found) -> Response:
        timeout_s = service.config.close_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await service.close(live, "client")
        except TimeoutError:
            raise TooSlow(f"session {live.id} is still closing after {timeout_s:g} s") from None
        return AsciiJSON(live.describe())


def _add_status(router: APIRouter, service: SandboxService) -> None:
    @router.get("/pools", response_model=PoolStatus, summary="Capacity, and boxes by task bundle.")
    async def pool_status() -> Response:
        return AsciiJSON(service.pool_status())

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses=json_errors(401, 500),
        summary="Metrics for Prometheus to scrape.",
    )
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics())
