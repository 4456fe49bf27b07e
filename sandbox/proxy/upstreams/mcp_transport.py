"""How to reach an MCP server: a boxed child over stdio, or streamable HTTP through the guard of
addresses, with secrets put in on the way."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx2

from sandbox.backends.printable import printable
from sandbox.proxy.boxes import Boxes
from sandbox.proxy.config import LimitsConfig, NetworkConfig
from sandbox.proxy.config import McpUpstream as Config
from sandbox.proxy.errors import AccessDenied, McpFailed, ResponseTooLarge, SecretUnavailable
from sandbox.proxy.network import AddressGuard, PinnedTransport
from sandbox.proxy.request import HttpRequest
from sandbox.proxy.scrub import Scrubber
from sandbox.proxy.secrets import SecretStore

TransportFactory = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes a context manager that yields a transport for ``mcp.Client``."""

_log = logging.getLogger("parl.proxy.mcp")


def transport_factory(
    config: Config,
    secrets: SecretStore,
    guard: AddressGuard,
    network: NetworkConfig,
    limits: LimitsConfig,
    boxes: Boxes,
) -> TransportFactory:
    """The transport that ``config`` asks for; each call of the result is a new connection."""
    if config.command is not None:
        return lambda: _stdio(config, secrets, boxes, limits.max_body_bytes)
    return lambda: _http(config, secrets, guard, network, limits)


@asynccontextmanager
async def _stdio(
    config: Config, secrets: SecretStore, boxes: Boxes, max_line_bytes: int
) -> AsyncIterator[Any]:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    assert config.command is not None, "checked by transport_factory"
    bound = secrets.env_of(config.command)
    # the first box of a proxy is tried out before
    start = await asyncio.to_thread(boxes.server, config, bound, 2 * max_line_bytes)
    parameters = StdioServerParameters(
        command=start.argv[0], args=start.argv[1:], env=start.env, cwd=start.directory
    )
    read, write = os.pipe()
    pump = asyncio.ensure_future(_pump_log(read, config.command, secrets.scrubber))
    failed: Exception | None = None
    with os.fdopen(write, "w") as stderr:
        try:
            yield stdio_client(parameters, errlog=stderr)
        except Exception as error:  # a boundary: groups of whatever the SDK's tasks met
            failed = error
    last_line = await pump
    await asyncio.to_thread(start.swept)
    if failed is not None:
        raise McpFailed(f"the MCP server ended ({last_line or 'it said nothing'})") from failed


async def _pump_log(descriptor: int, command: str, scrubber: Scrubber) -> str:
    """What the server writes to its standard error becomes log lines, scrubbed; the last one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    pending, last = b"", ""
    while chunk := await reader.read(65536):
        *lines, pending = (pending + chunk)[-65536:].split(b"\n")
        for line in lines:
            text = scrubber.text(line.decode("utf-8", "replace")[:1000])
            last = text.strip()[:300] or last
            _log.debug("%s: %s", command, text)
    transport.close()
    return printable(last)


@asynccontextmanager
async def _http(
    config: Config,
    secrets: SecretStore,
    guard: AddressGuard,
    network: NetworkConfig,
    limits: LimitsConfig,
) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import streamable_http_client

    assert config.url is not None, "checked by transport_factory"
    origin = urlsplit(config.url)

    async def put_secrets_in(request: httpx2.Request) -> None:
        url = request.url
        if (url.scheme, url.host, url.port) != (origin.scheme, origin.hostname, origin.port):
            raise AccessDenied("the MCP server sends its client to another host")
        _apply(request, http_request_of(request.method, str(url)), secrets)

    timeout = httpx2.Timeout(
        limits.timeout_s, connect=network.connect_timeout_s, read=limits.deadline_s
    )
    async with httpx2.AsyncClient(
        transport=_CappedTransport(guard, network, limits.max_body_bytes),
        trust_env=False,
        timeout=timeout,
        event_hooks={"request": [put_secrets_in]},
    ) as client:
        yield streamable_http_client(
            config.url, http_client=client, max_sse_event_size=limits.max_body_bytes
        )


def http_request_of(method: str, url: str) -> HttpRequest:
    """A bodiless HttpRequest for access rules and secret bindings."""
    parts = urlsplit(url)
    return HttpRequest(
        method=method,
        scheme=parts.scheme,
        host=(parts.hostname or "").lower(),
        port=parts.port,
        path=parts.path or "/",
        query=tuple(parse_qsl(parts.query, keep_blank_values=True)),
    )


def _apply(request: httpx2.Request, plain: HttpRequest, secrets: SecretStore) -> None:
    ready, _ = secrets.inject(plain)
    if ready.has_body or any(
        name == "authorization" and value.startswith("AWS4-") for name, value in ready.headers
    ):
        raise SecretUnavailable("an MCP server's secret goes into a header or the query")
    request.headers.update(dict(ready.headers))
    request.url = httpx2.URL(ready.url)


class _CappedTransport(PinnedTransport):
    """Refuses larger bodies; event streams may be long, their events are capped by the SDK."""

    def __init__(self, guard: AddressGuard, network: NetworkConfig, max_bytes: int) -> None:
        super().__init__(guard, network.max_connections)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            assert isinstance(response.stream, httpx2.AsyncByteStream), "an async transport"
            response.stream = _CappedStream(response.stream, self._max_bytes)
        return response


class _CappedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._inner = inner
        self._left = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._left -= len(chunk)
            if self._left < 0:
                raise ResponseTooLarge("the MCP server's answer is too large")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
