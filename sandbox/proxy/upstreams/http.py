"""HttpSender: one attempt of one HTTP request, with every cap of facts/sandboxes.md 2, point 7."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

import httpx2

from sandbox.proxy.config import LimitsConfig, NetworkConfig
from sandbox.proxy.errors import (
    BadArguments,
    CredentialRefused,
    RateLimited,
    RedirectRefused,
    ResponseTooLarge,
    Transient,
    Unreachable,
    UpstreamFailed,
)
from sandbox.proxy.network import AddressGuard, PinnedTransport
from sandbox.proxy.request import HttpRequest
from sandbox.proxy.result import Reply
from sandbox.proxy.scrub import Scrubber
from sandbox.proxy.secrets import SecretStore

KEPT_HEADERS = ("content-type", "etag", "last-modified", "retry-after", "link", "x-total-count")
"""Response headers a cassette keeps; others may hold cookies and request ids."""
_NOT_SENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NUM_POOLS = 8
"""A pool's work grows with the square of the requests that use it at once."""
CheckAccess = Callable[[HttpRequest], None]
"""Raises AccessDenied."""


class _Progress:
    """Whether a request began to leave; before that it certainly had no effect."""

    def __init__(self) -> None:
        self.sending = False

    async def trace(self, event: str, info: Any) -> None:
        """httpcore's trace hook."""
        if event.endswith(".send_request_headers.started"):
            self.sending = True


class HttpSender:
    """Shared by every HTTP upstream of a proxy; keeps connections alive."""

    def __init__(
        self,
        secrets: SecretStore,
        guard: AddressGuard,
        network: NetworkConfig,
        limits: LimitsConfig,
    ) -> None:
        self._secrets = secrets
        self._limits = limits
        self._network = network
        self._clients = [
            httpx2.AsyncClient(
                transport=PinnedTransport(guard, -(-network.max_connections // _NUM_POOLS)),
                trust_env=False,
                follow_redirects=False,
                # episodes share the client, never a session
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                headers={"User-Agent": "parl-proxy", "Accept": "application/json, text/*;q=0.9"},
            )
            for _ in range(_NUM_POOLS)
        ]
        self._turns = itertools.cycle(self._clients)

    async def send(self, request: HttpRequest, check: CheckAccess, timeout_s: float) -> Reply:
        """One attempt, redirects within the same origin included. Transient for what another
        attempt may cure; RedirectRefused, ResponseTooLarge, CredentialRefused, AccessDenied (a
        redirect's target is checked like any request)."""
        if len(request.content()) > self._limits.max_request_bytes:
            raise BadArguments(f"the request body is over {self._limits.max_request_bytes} bytes")
        progress = _Progress()
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(self._limits.max_redirects + 1):
                    check(request)
                    reply, location = await self._exchange(request, timeout_s, progress)
                    if location is None:
                        return reply
                    request = _redirected(request, location)
        except TimeoutError:
            lost = Unreachable(f"no complete answer within {timeout_s:g} s")
            raise Transient(lost, applied=progress.sending) from None
        raise RedirectRefused(f"more than {self._limits.max_redirects} redirects")

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def _exchange(
        self, request: HttpRequest, timeout_s: float, progress: _Progress
    ) -> tuple[Reply, str | None]:
        ready, scrubber = self._secrets.inject(request)
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, self._network.connect_timeout_s))
        client = next(self._turns)
        outgoing = client.build_request(
            ready.method,
            ready.url,
            headers=dict(ready.headers),
            content=ready.content() if ready.has_body else None,
            timeout=timeout,
            extensions={"trace": progress.trace},
        )
        try:
            response = await client.send(outgoing, stream=True)
            try:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    return Reply(b""), response.headers["location"]
                body = await self._body(response)
            finally:
                await response.aclose()
        except _NOT_SENT:
            raise Transient(Unreachable("no connection to the upstream"), applied=False) from None
        except (httpx2.RequestError, httpx2.StreamError) as error:
            raise Transient(
                Unreachable(f"the upstream's answer was lost ({type(error).__name__})"),
                applied=True,
            ) from None
        self._raise_for(response, ready is not request)
        return _reply(response, body, scrubber), None

    async def _body(self, response: httpx2.Response) -> bytes:
        limit = self._limits.max_body_bytes
        declared = response.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise ResponseTooLarge(_too_large(limit), response.status_code)
        chunks, size = [], 0
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            if size > limit:  # counted after decompression: a bomb ends here
                raise ResponseTooLarge(_too_large(limit), response.status_code)
            chunks.append(chunk)
        return b"".join(chunks)

    @staticmethod
    def _raise_for(response: httpx2.Response, with_secret: bool) -> None:
        status = response.status_code
        wait_s = _retry_after_s(response.headers.get("retry-after"))
        if status == 429:
            raise Transient(
                RateLimited("the upstream limits the rate", status),
                applied=False,
                retry_after_s=wait_s,
            )
        if status == 401 and with_secret:
            raise CredentialRefused("the upstream refuses the proxy's credential", status)
        if status == 408 or status >= 500:
            raise Transient(
                UpstreamFailed(f"the upstream failed with status {status}", status),
                # 501 and 503 say that nothing was done; behind the others something may have been
                applied=status not in (501, 503),
                retry_after_s=wait_s,
            )


def _too_large(limit: int) -> str:
    return f"the answer is over {limit} bytes; ask for less, with a filter, a page or fewer fields"


def _reply(response: httpx2.Response, body: bytes, scrubber: Scrubber) -> Reply:
    headers = {
        name: scrubber.text(response.headers[name])
        for name in KEPT_HEADERS
        if name in response.headers
    }
    return Reply(
        body=scrubber.data(body),
        media_type=headers.get(
            "content-type", "application/octet-stream" if body else "text/plain"
        ),
        status=response.status_code,
        headers=headers,
    )


def _redirected(request: HttpRequest, location: str) -> HttpRequest:
    """The request at its new place, without secrets. Only reads move, only within the origin."""
    target = urlsplit(urljoin(request.url, location))
    same = (target.scheme, (target.hostname or "").lower(), _port(target.scheme, target.port)) == (
        request.scheme,
        request.host,
        _port(request.scheme, request.port),
    )
    if not same:
        raise RedirectRefused("the upstream redirects to another host; name that host instead")
    if request.method not in ("GET", "HEAD"):
        raise RedirectRefused(f"the upstream redirects a {request.method}, which is not repeated")
    return replace(
        request,
        path=target.path or "/",
        query=tuple(parse_qsl(target.query, keep_blank_values=True)),
        raw_query=None,
    )


def _port(scheme: str, port: int | None) -> int | None:
    return port if port is not None else {"http": 80, "https": 443}.get(scheme)


def _retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or an HTTP date; None when it is neither."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        parsed = email.utils.parsedate_tz(text)
        return None if parsed is None else max(0.0, email.utils.mktime_tz(parsed) - time.time())
