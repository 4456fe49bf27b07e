"""The two doors of a node's proxy, as ASGI applications.

Agent door: ``GET /v1/tools`` and ``POST /v1/call`` with an episode's token; nothing else, so a
sandbox that holds the socket reaches the tools of its own episode only. Control door: opens and
closes episodes, adds worlds, turns the kill switch; its socket belongs to the node's user.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infra.errors import ParlError
from sandbox.proxy.config import WorldConfig
from sandbox.proxy.errors import BadToken, CallFailure
from sandbox.proxy.proxy import ToolProxy

_MAX_REQUEST_BYTES = 8 << 20
M = TypeVar("M", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentCall(_Body):
    """Body of ``POST /v1/call`` at the agent door."""

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    call_index: int | None = Field(default=None, ge=0)


class ControlCall(AgentCall):
    """At the control door: for a session on the host, which knows what was repaired."""

    token: str
    repairs: list[str] = []
    policy_version: int | None = None


class OpenEpisode(_Body):
    """Body of ``POST /v1/episodes``."""

    episode: str
    world: str
    policy_version: int | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    replace: bool = False
    owner: str | None = None


class AddWorld(_Body):
    """Body of ``POST /v1/worlds``."""

    name: str
    config: WorldConfig


class KillSwitch(_Body):
    """Body of ``POST /v1/kill_switch``."""

    on: bool


class BadRequest(Exception):
    """The body is too large, no JSON, or has the wrong fields."""


def agent_door(proxy: ToolProxy) -> Starlette:
    """What a sandbox may reach."""

    async def tools(request: Request) -> Response:
        specs = proxy.tools(_token(request))
        return JSONResponse({"tools": [spec.to_openai() for spec in specs]})

    async def call(request: Request) -> Response:
        token = _token(request)
        proxy.episode(token)  # before the body is read
        body = await _parsed(request, AgentCall)
        result = await proxy.call(token, body.tool, body.arguments, call_index=body.call_index)
        return JSONResponse(result.to_dict())

    return _application({("GET", "/v1/tools"): tools, ("POST", "/v1/call"): call})


def control_door(proxy: ToolProxy) -> Starlette:
    """What the node's orchestrator may reach."""

    async def health(request: Request) -> Response:
        return JSONResponse({"episodes": proxy.num_episodes, "killed": await proxy.killed()})

    async def open_episode(request: Request) -> Response:
        body = await _parsed(request, OpenEpisode)
        episode = await proxy.open_episode(
            body.episode,
            body.world,
            policy_version=body.policy_version,
            data=body.data,
            replace=body.replace,
            owner=body.owner,
        )
        specs = proxy.tools(episode.token)
        return JSONResponse(
            {
                "token": episode.token,
                "tools": [
                    {
                        "name": spec.name,
                        "description": spec.description,
                        "schema": spec.schema,
                        "effect": spec.effect,
                        "idempotent": spec.idempotent,
                        "rate": spec.rate,
                    }
                    for spec in specs
                ],
                "cassettes": episode.world.cassette_digests(),
            }
        )

    async def close_episode(request: Request) -> Response:
        await proxy.close_episode(_token(request))
        return JSONResponse({})

    async def call(request: Request) -> Response:
        body = await _parsed(request, ControlCall)
        result = await proxy.call(
            body.token,
            body.tool,
            body.arguments,
            call_index=body.call_index,
            repairs=body.repairs,
            policy_version=body.policy_version,
        )
        return JSONResponse(result.to_dict())

    async def add_world(request: Request) -> Response:
        body = await _parsed(request, AddWorld)
        world = await proxy.add_world(body.name, body.config)
        return JSONResponse({"tools": sorted(world.tools)})

    async def kill_switch(request: Request) -> Response:
        body = await _parsed(request, KillSwitch)
        proxy.set_kill_switch(body.on)
        return JSONResponse({"killed": await proxy.killed()})

    return _application(
        {
            ("GET", "/healthz"): health,
            ("POST", "/v1/episodes"): open_episode,
            ("DELETE", "/v1/episodes"): close_episode,
            ("POST", "/v1/call"): call,
            ("POST", "/v1/worlds"): add_world,
            ("POST", "/v1/kill_switch"): kill_switch,
        }
    )


Endpoint = Callable[[Request], Awaitable[Response]]


def _application(endpoints: dict[tuple[str, str], Endpoint]) -> Starlette:
    routes = [
        Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            BadToken: _answer(401),
            BadRequest: _answer(400),
            CallFailure: _answer(503),
            ParlError: _answer(400),
        },
    )


def _answer(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def handler(request: Request, error: Exception) -> JSONResponse:
        code = error.code if isinstance(error, CallFailure) else type(error).__name__
        return JSONResponse({"error": code, "message": str(error)}, status_code=status)

    return handler


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise BadToken("expected the header Authorization: Bearer TOKEN")
    return token


async def _parsed(request: Request, model: type[M]) -> M:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MAX_REQUEST_BYTES:
            raise BadRequest(f"the request is over {_MAX_REQUEST_BYTES} bytes")
        chunks.append(chunk)
    try:
        return model.model_validate(json.loads(b"".join(chunks)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{place or 'body'}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON") from None
