"""BodyLimit: ASGI middleware that reads a body whole, up to a size and within a time."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox.server.wire import AsciiJSON


class BodyLimit:
    """413 for a larger body (announced or not), 408 for one that does not arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            text = f"the body did not arrive within {self._timeout_s:g} s"
            await _refuse(408, "body_timeout", text)(scope, receive, send)
            return
        if body is None:
            text = f"the body is larger than {self._max_bytes} bytes"
            await _refuse(413, "body_too_large", text)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None when it is too large."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > self._max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return bytes(body)  # the client went away; what was sent is no whole body
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def _refuse(status: int, code: str, message: str) -> AsciiJSON:
    # the rest of the body is still on the wire
    content = {"error": code, "message": message, "infra": False}
    return AsciiJSON(content, status_code=status, headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
