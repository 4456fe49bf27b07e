"""serve(config): the node's proxy process, two unix sockets and optionally 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.doors import agent_door, control_door
from sandbox.proxy.errors import ProxyConfigError
from sandbox.proxy.pipeline import KillSwitch
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.scrub import ScrubFilter
from sandbox.quota import QuotaStore

_BACKLOG = 4096
_OWNERS_EVERY_S = 2.0
_LOUD = ("httpx2", "httpcore2", "mcp", "uvicorn.access")
"""Loggers that would write URLs and headers with secrets in them."""
_log = logging.getLogger("parl.proxy")


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A proxy that is being served. ``loopback_port`` is None without a TCP door."""

    proxy: ToolProxy
    agent_socket: Path
    control_socket: Path
    loopback_port: int | None


async def serve(
    config: ProxyConfig,
    *,
    quotas: QuotaStore | None = None,
    kill_switch: KillSwitch | None = None,
    ready: asyncio.Future[RunningProxy] | None = None,
) -> None:
    """Serve until cancelled; then end every child process and connection.

    ``ready`` is set when both doors are open and every configured world is loaded.
    ProxyConfigError: a bad configuration, or another proxy serves this state directory.
    """
    async with running(config, quotas=quotas, kill_switch=kill_switch) as proxy:
        if ready is not None:
            ready.set_result(proxy)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def running(
    config: ProxyConfig,
    *,
    quotas: QuotaStore | None = None,
    kill_switch: KillSwitch | None = None,
) -> AsyncIterator[RunningProxy]:
    """``serve`` as a context: the proxy runs inside it."""
    proxy = ToolProxy(config, quotas=quotas, kill_switch=kill_switch)
    quiet_logs(ScrubFilter(proxy.secrets.scrubber))
    agent = [_unix_socket(config.agent_path, 0o666)]
    control = [_unix_socket(config.control_path, 0o600)]
    port = None
    if config.loopback_port is not None:
        tcp = socket.create_server(("127.0.0.1", config.loopback_port), backlog=_BACKLOG)
        port = tcp.getsockname()[1]
        agent.append(tcp)
    servers = [(_server(agent_door(proxy)), agent), (_server(control_door(proxy)), control)]
    serving: list[asyncio.Task[None]] = []
    watching: asyncio.Task[None] | None = None
    try:
        await proxy.start()
        serving = [asyncio.ensure_future(server.serve(bound)) for server, bound in servers]
        watching = asyncio.ensure_future(_watch_owners(proxy))
        while not all(server.started for server, _ in servers):
            await asyncio.sleep(0.005)
        yield RunningProxy(proxy, config.agent_path, config.control_path, port)
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        for server, _ in servers:
            server.should_exit = True
        if serving:
            await asyncio.wait(serving)
        await proxy.close()
        for bound in (*agent, *control):
            bound.close()
        for path in (config.agent_path, config.control_path):
            path.unlink(missing_ok=True)


async def _watch_owners(proxy: ToolProxy) -> None:
    """An episode ends with the process that opened it, even one that had no time for goodbyes."""
    while True:
        await asyncio.sleep(_OWNERS_EVERY_S)
        num_closed = await proxy.close_abandoned()
        if num_closed:
            _log.warning("closed %d episodes whose owner is dead", num_closed)


def quiet_logs(scrub: ScrubFilter) -> None:
    """Keep secrets out of the logs: libraries that print requests are silenced below WARNING, every
    handler of the root logger scrubs what is left."""
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(scrub)


class _Server(uvicorn.Server):
    """Signals are the process's business, not each server's."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def _server(application: Starlette) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=_BACKLOG,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=5,
            server_header=False,
        )
    )


def _unix_socket(path: Path, mode: int) -> socket.socket:
    """A listening socket; a file that a killed proxy left behind is replaced, a live one is not."""
    if len(os.fsencode(path)) > 100:
        raise ProxyConfigError(
            f"{path}: a socket's path has at most 100 bytes; choose a shorter one"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
        else:
            raise ProxyConfigError(f"{path}: another proxy serves here; stop it or choose another")
    bound = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o777 & ~mode)  # the file must never exist with wider rights
    try:
        bound.bind(str(path))
    finally:
        os.umask(mask)
    bound.listen(_BACKLOG)
    return bound
