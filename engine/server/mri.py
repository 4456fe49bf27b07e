"""MRI over HTTP: a POST for each verb, the engine's own error classes in the answers.

    GET  /mri/info                      EngineInfo
    POST /mri/init_context ... release  JSON bodies of engine.adapters.service
    POST /mri/stream_step               newline-delimited JSON: delta ..., then result or error
    PUT  /mri/load_weights              a safetensors file with its manifest
    POST /mri/load_weights              {"path": version folder below the server's weights folder}

Every answer carries X-MRI-Version. A client that says 1.0 is answered as 1.0 did, without the
confirmation of an eviction. A caller that hangs up ends its step.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from engine.adapters.service import BODIES, LEASE_S, MriService, unpack_weights
from engine.adapters.wire import decode_error, encode_error
from engine.errors import (
    CapacityError,
    ContextLost,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    InvalidStateError,
    NotSupportedError,
    TryAgainLater,
)
from engine.runtime.protocol import MRI_VERSION, ModelRuntime
from engine.runtime.types import ContextId

log = structlog.get_logger(__name__)
HEADER = "X-MRI-Version"
VERSIONS = ("1.0", "1.1")
MAX_BODY_BYTES = 64 * 1024**2
"""Of a verb: several million token ids."""
MAX_WEIGHTS_BYTES = 64 * 1024**3
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (TryAgainLater, 429),
    (ContextLost, 404),
    (ContextTooLong, 413),
    (CapacityError, 503),
    (InvalidStateError, 409),
    (NotSupportedError, 501),
    (DeadlineExceeded, 504),
    # what is left of these says that the request is wrong: weights, constraints, draw keys
    (ValueError, 422),
)
_ANSWERS: dict[int | str, dict[str, Any]] = {400: {"description": "the body is no JSON object"}}
_ANSWERS |= {status: {"description": kind.__name__} for kind, status in _STATUS}


class WeightsPath(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str


def mri_router(
    runtime: ModelRuntime,
    *,
    version: str = MRI_VERSION,
    lease_s: float = LEASE_S,
    weights_root: Path | None = None,
    weights_allowed: bool = True,
) -> APIRouter:
    """Routes for one engine; access control is the app's. ``version``: the newest that is spoken.
    ``weights_allowed=False`` leaves load_weights out: a server for people, whose keys should not
    change the policy."""
    if version not in VERSIONS:
        raise ValueError(f"MRI version {version!r}; expected one of {', '.join(VERSIONS)}")
    router = APIRouter(prefix="/mri", tags=["mri"], responses=_ANSWERS)
    door = _Door(MriService(runtime, lease_s=lease_s, weights_root=weights_root), version)
    router.add_api_route("/info", door.info, methods=["GET"], name="mri_info")
    for verb in BODIES:
        router.add_api_route(
            f"/{verb}",
            door.stream if verb == "stream_step" else door.verb(verb),
            methods=["POST"],
            name=f"mri_{verb}",
            openapi_extra=_schema(verb),
        )
    if weights_allowed:
        route = "/load_weights"
        router.add_api_route(
            route, door.put_weights, methods=["PUT"], name="mri_put_weights", openapi_extra=_BINARY
        )
        router.add_api_route(route, door.read_weights, methods=["POST"], name="mri_read_weights")
    return router


def mri_app(runtime: ModelRuntime, **options: Any) -> FastAPI:
    """Nothing but MRI; options as in ``mri_router``. For engines in a process of their own."""
    app = FastAPI(title="PARL MRI", version=MRI_VERSION)
    app.include_router(mri_router(runtime, **options))
    return app


class _Door:
    """The endpoints."""

    def __init__(self, service: MriService, newest: str) -> None:
        self._service = service
        self._newest = newest

    async def info(self, request: Request) -> Response:
        return await self._answer(request, lambda spoken: self._service.call("info", {}, spoken))

    def verb(self, verb: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def endpoint(request: Request) -> Response:
            async def run(spoken: str) -> dict[str, Any]:
                body = await _object(request)
                if verb not in ("forward_step", "init_context", "fork"):
                    return await self._service.call(verb, body, spoken)
                return await _while_connected(request, self._service, verb, body)

            return await self._answer(request, run)

        return endpoint

    async def stream(self, request: Request) -> Response:
        try:
            spoken = _spoken(request, self._newest)
            items = self._service.stream(await _object(request))
            # an error before the first token has a status of its own
            first = await anext(items)
        except Exception as error:
            return self._failed(error)
        if "error" in first:
            return self._failed(decode_error(first["error"]))

        async def lines() -> AsyncIterator[bytes]:
            async with aclosing(items):  # type: ignore[type-var]
                yield _line(first)
                async for item in items:
                    yield _line(item)

        return StreamingResponse(
            lines(), media_type="application/x-ndjson", headers={HEADER: spoken}
        )

    async def put_weights(self, request: Request) -> Response:
        async def run(spoken: str) -> dict[str, Any]:
            data = await _body(request, MAX_WEIGHTS_BYTES)
            return await self._service.load_weights(await asyncio.to_thread(unpack_weights, data))

        return await self._answer(request, run)

    async def read_weights(self, request: Request, body: WeightsPath) -> Response:
        return await self._answer(
            request, lambda spoken: self._service.load_weights_from(body.path)
        )

    async def _answer(
        self, request: Request, run: Callable[[str], Coroutine[Any, Any, dict[str, Any]]]
    ) -> Response:
        try:
            spoken = _spoken(request, self._newest)
            return JSONResponse(await run(spoken), headers={HEADER: spoken})
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> Response:
        """Typed errors by their class; a bug is a 500 that says so, and a log entry."""
        headers = {HEADER: self._newest}
        if isinstance(error, _BadRequest):
            data = {"type": "ValueError", "message": str(error)}
            return JSONResponse({"error": data}, error.status, headers)
        if not isinstance(error, (EngineError, ValueError)):
            log.error("mri_call_failed", exc_info=error)
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        data = encode_error(error)
        if "retry_after_s" in data:
            headers["Retry-After"] = str(max(1, math.ceil(data["retry_after_s"])))
        return JSONResponse({"error": data}, status, headers)


_BINARY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def _schema(verb: str) -> dict[str, Any]:
    """The body's JSON schema; its own definitions are written in place."""
    schema = BODIES[verb].model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


# -- requests and answers -----------------------------------------------------------------------


class _BadRequest(Exception):
    """400 or 413: what came is no request of MRI."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def _spoken(request: Request, newest: str) -> str:
    """The older of the two versions; a client that says nothing gets the newest."""
    wanted = request.headers.get(HEADER, newest)
    try:
        major, minor = (int(part) for part in wanted.split("."))
    except ValueError:
        raise _BadRequest(f"{HEADER}: {wanted[:40]!r}, expected a version such as 1.1") from None
    if major != 1 or minor < 0:
        raise _BadRequest(f"{HEADER}: {wanted[:40]!r}; this server speaks 1.0 to {newest}")
    return newest if (major, minor) >= tuple(map(int, newest.split("."))) else "1.0"


async def _body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _BadRequest(f"body of {declared} bytes, at most {limit} are read", 413)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _BadRequest(f"body of more than {limit} bytes", 413)
        parts.append(part)
    return b"".join(parts)


async def _object(request: Request) -> dict[str, Any]:
    data = await _body(request, MAX_BODY_BYTES)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _BadRequest(f"the body is no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise _BadRequest(f"the body is a JSON {type(body).__name__}, expected an object")
    return body


async def _while_connected(
    request: Request, service: MriService, verb: str, body: dict[str, Any]
) -> dict[str, Any]:
    """A caller that hangs up ends what it asked for, and what it opened is released."""
    running = asyncio.ensure_future(service.call(verb, body))
    gone = asyncio.ensure_future(_hangs_up(request))
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait((running,))
            raise _BadRequest("the caller hung up", 499)
        answer = running.result()
        if gone.done() and "ctx" in answer:
            await service.call("release", {"ctx": ContextId(answer["ctx"])})
        return answer
    finally:
        running.cancel()
        gone.cancel()


async def _hangs_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _line(item: dict[str, Any]) -> bytes:
    return json.dumps(item, separators=(",", ":")).encode() + b"\n"
