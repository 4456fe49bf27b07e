"""serve: the server as a process, from opening the port to the last box closed."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable

import uvicorn

from infra.db.engine import open_ledger
from infra.leases import LeaseBook
from infra.ports import listener_of
from sandbox.server.app import make_app
from sandbox.server.config import ServerConfig
from sandbox.server.errors import PortTaken
from sandbox.server.service import SandboxService

_BACKLOG = 512
_IDLE_CONNECTION_S = 75
"""Longer than clients keep an idle connection, so that none is closed as they use it again."""
_KEEPALIVE_IDLE_S = 30
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_COUNT = 3


def serve(
    config: ServerConfig,
    token: str,
    ledger_url: str,
    *,
    host: str,
    port: int,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then close every box; ``ready`` gets the URL.

    PortTaken when the address cannot be opened; BackendUnavailable, TaskError and LedgerError
    before anything is served.
    """
    listener = open_port(host, port)
    try:
        ledger = open_ledger(ledger_url, create=True)
        try:
            asyncio.run(_serve(config, token, LeaseBook(ledger), listener, ready))
        finally:
            ledger.close()
    finally:
        listener.close()


async def _serve(
    config: ServerConfig,
    token: str,
    leases: LeaseBook,
    listener: socket.socket,
    ready: Callable[[str], None],
) -> None:
    service = SandboxService(config, leases)
    server = _Server(
        uvicorn.Config(
            make_app(service, token),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
            server_header=False,
        ),
        lambda: ready(_url(listener)),
        service.stop,
    )
    # uvicorn raises the signal again when it is done; an ordered stop is no failure
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        await service.start()
        await server.serve(sockets=[listener])
    finally:
        await service.stop()


class _Server(uvicorn.Server):
    """Says when it takes requests; ends the running ones when it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # side by side: the calls that run are told so while their connections are still open
        await asyncio.gather(super().shutdown(sockets), self._stop())


def open_port(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 = any free one. PortTaken names who has it.

    Connections inherit keepalive, so a client that vanished holds no descriptor for long.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        raise PortTaken(f"{host}:{port} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        holder = f" (held by {listener_of(port)})" if port else ""
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror}{holder}; take another --port, or 0 "
            "for any free one"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
