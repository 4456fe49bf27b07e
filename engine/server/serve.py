"""serve: the server as a process, from opening the port to the engine's end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import structlog
import uvicorn

from engine.errors import EngineError
from engine.server.app import add_mri, create_app
from engine.server.config import ListenSection, ServeConfig
from engine.server.keys import load_keys
from engine.server.service import Loaded, Service
from infra.ports import listener_of

_BACKLOG = 2048
_IDLE_CONNECTION_S = 75
"""Longer than clients keep an idle connection, so that none is closed as they use it again."""
log = structlog.get_logger(__name__)


class PortTaken(EngineError):
    """The address to serve on cannot be opened."""


def serve(
    config: ServeConfig,
    load: Callable[[ServeConfig], Loaded],
    *,
    listening: Callable[[str], None],
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, let running requests end (limits.drain_timeout_s), then end
    the engine.

    ``load`` runs in a thread while /health answers already; ``listening`` and ``ready`` get the
    URL. KeysError and PortTaken come before anything is loaded; what ``load`` raises ends the
    server.
    """
    keys = load_keys(config.listen)
    listener = open_port(config.listen)
    try:
        asyncio.run(_serve(Service(config, keys), load, listener, listening, ready))
    finally:
        listener.close()


async def _serve(
    service: Service,
    load: Callable[[ServeConfig], Loaded],
    listener: socket.socket,
    listening: Callable[[str], None],
    ready: Callable[[str], None],
) -> None:
    url = _url(listener)
    drain_s = service.config.limits.drain_timeout_s
    app = create_app(service)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            server_header=False,
        ),
        service.drain,
    )
    # uvicorn raises the signal again when it is done; an ordered stop is no failure
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(_load(service, load))
    try:
        listening(url)
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            error = loading.exception()
            if error is not None:
                server.should_exit = True
                await serving
                raise error
            if service.status == "ok":
                add_mri(app, service)
                ready(url)
        await serving
    finally:
        # a load cannot be stopped half-way: its thread ends with it
        await asyncio.gather(loading, return_exceptions=True)
        service.close()


async def _load(service: Service, load: Callable[[ServeConfig], Loaded]) -> None:
    loaded = await asyncio.to_thread(load, service.config)
    try:
        await service.start(loaded)
    except BaseException:
        loaded.close()
        raise


class _Server(uvicorn.Server):
    """Says that it drains before it waits for the running requests."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        log.info("draining", connections=len(self.server_state.connections))
        await super().shutdown(sockets)


def open_port(listen: ListenSection) -> socket.socket:
    """A listening TCP socket; PortTaken names who has it."""
    host, port = listen.host, listen.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        raise PortTaken(f"{host}:{port} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        holder = f" (held by {listener_of(port)})" if port else ""
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror}{holder}; take another listen.port, "
            "or 0 for any free one"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
