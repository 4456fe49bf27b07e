"""The agent door: the task, and calls. A token names its session, so there is no other to ask for.

Nothing here tells about verifier, upstreams or host: a lost box is reported without its last words.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response, Security
from fastapi.security import HTTPBearer

from sandbox.server.door import IdempotencyKey, errors, guarded
from sandbox.server.live import LiveSession
from sandbox.server.service import SandboxService
from sandbox.server.wire import (
    AgentTask,
    AsciiJSON,
    ObservationBody,
    OpenAICall,
    TextCall,
    ToolCall,
    observation_body,
)
from sandbox.session import RawCall

PREFIX = "/agent"
_SCHEME = HTTPBearer(scheme_name="agent", auto_error=False)


def agent_router(service: SandboxService) -> APIRouter:
    """Every route needs a token that was handed out at create, while its session is open."""

    def authorise(request: Request, token: str) -> None:
        request.state.live = service.by_token(token)

    def session_of(request: Request) -> LiveSession:
        return request.state.live

    own = Depends(session_of)
    router = APIRouter(
        prefix=PREFIX,
        tags=["agent"],
        route_class=guarded(authorise),
        dependencies=[Security(_SCHEME)],
        default_response_class=AsciiJSON,
        responses=errors(401, 500),
    )

    @router.get(
        "/task",
        response_model=AgentTask,
        summary="Instruction, tools and limits; also a sign of life.",
    )
    async def get_task(live: LiveSession = own) -> Response:
        live.touch()
        return AsciiJSON(_task(live))

    @router.post(
        "/calls",
        response_model=ObservationBody,
        responses=errors(400, 404, 408, 409, 413, 422, 429, 502, 503),
        summary="Call a tool; a violation is an observation, not an HTTP error.",
    )
    async def call_tool(
        body: Annotated[ToolCall, Body()],
        live: LiveSession = own,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        raw, call_id = _raw(body)
        seen, repeated = await service.call(live, raw, idempotency_key)
        headers = {"Idempotency-Replayed": "true"} if repeated else None
        return AsciiJSON(observation_body(seen, call_id), headers=headers)

    return router


def _raw(body: TextCall | OpenAICall) -> tuple[RawCall, str | None]:
    if isinstance(body, TextCall):
        name, arguments, call_id = body.name_text, body.arguments_text, None
    else:
        name, arguments, call_id = body.function.name, body.function.arguments, body.id
    return RawCall(name, arguments, body.turn, body.finish_reason), call_id


def _task(live: LiveSession) -> dict[str, Any]:
    spec = live.spec
    return {
        "instruction": spec.instruction,
        # what an agent of the same process is told too: chat renderers take spec.tools
        "tools": [tool.to_openai() for tool in spec.tools],
        "limits": asdict(spec.limits),
        "open": live.open,
        "stop": live.stop,
    }
