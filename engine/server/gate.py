"""Gate: ASGI middleware around every request: its id, its key, the room for it, its body (whole,
up to a size and within a time), and one line in the log when it is over."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError, BodyTimeout, Busy, NotReady, TooLarge, answer_to
from engine.server.keys import ANYONE
from engine.server.metrics import outcome_of
from engine.server.service import Service

log = structlog.get_logger(__name__)
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
"""Without a key: they tell of no request."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_STATE = "parl_record"


@dataclass(slots=True)
class Record:
    """One request, for the log; routes add what they know to ``values``."""

    id: str
    method: str
    path: str
    began: float
    user: str = ANYONE
    status: int = 0
    outcome: str = ""
    """What the status alone does not say."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])


def record_of(scope: Scope) -> Record:
    return scope["state"][_STATE]


class Gate:
    """Errors before the routes have OpenAI's shape too."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        record = Record(
            given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}",
            scope["method"],
            scope["path"],
            time.monotonic(),
        )
        scope.setdefault("state", {})[_STATE] = record

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.id
                if self._service.status == "draining":
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        try:
            await self._enter(scope, receive, reply, record, headers)
        except BaseException:
            record.outcome = record.outcome or "error"
            raise
        finally:
            self._leave(record)

    async def _enter(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        record: Record,
        headers: dict[bytes, bytes],
    ) -> None:
        if record.path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            record.user = self._service.keys.user_of(
                headers.get(b"authorization", b"").decode("latin-1")
            )
            if not record.path.startswith("/v1/"):
                # other interfaces read their bodies themselves: weights are large
                await self._app(scope, receive, send)
                return
            body = await self._read(receive, headers)
            counted = record.method == "POST"
            if counted:
                self._admit()
        except ApiError as error:
            await refuse(error)(scope, receive, send)
            return
        receive = _replay(body, receive)
        if not counted:
            await self._app(scope, receive, send)
            return
        self._service.num_running += 1
        self._service.metrics.running(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.num_running -= 1
            self._service.metrics.running(-1)

    def _admit(self) -> None:
        service, limits = self._service, self._service.config.limits
        if service.status != "ok":
            raise NotReady(f"the server is {service.status}; try another one, or later")
        if service.num_running >= limits.max_concurrent:
            raise Busy(
                f"{service.num_running} requests run, the most that this server takes at once; "
                f"come back in {limits.retry_after_s:g} s",
                limits.retry_after_s,
            )

    async def _read(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        limits = self._service.config.limits
        announced = headers.get(b"content-length", b"0")
        too_large = TooLarge(
            f"the body is larger than {limits.max_body_bytes} bytes; send less, or raise "
            "limits.max_body_bytes"
        )
        if not announced.isdigit() or int(announced) > limits.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return bytes(body)  # the client went away; its body is not whole
                    body += message.get("body", b"")
                    if len(body) > limits.max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise BodyTimeout(
                f"the body did not arrive within {limits.body_timeout_s:g} s"
            ) from None

    def _leave(self, record: Record) -> None:
        outcome = record.outcome or outcome_of(record.status or 500)
        if record.path in OPEN_PATHS:
            return
        self._service.metrics.request(outcome)
        log.info(
            "request",
            request_id=record.id,
            method=record.method,
            path=record.path,
            user=record.user,
            status=record.status,
            outcome=outcome,
            ms=round(1000 * (time.monotonic() - record.began), 1),
            **record.values,
        )


def refuse(error: ApiError) -> JSONResponse:
    """The answer to a request whose body may still be on the wire."""
    answer = answer_to(error)
    headers = answer.headers()
    if answer.status in (408, 413):
        headers["Connection"] = "close"
    return JSONResponse(answer.body(), answer.status, headers)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body again, then what the connection says (that the client went away)."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
