"""The tool proxy: what a call costs, and many episodes waiting: ``python -m sandbox.bench.proxy``.

A real API on this machine is called directly and through the proxy (in process and over the control
socket), then replayed; then each of many episodes waits on one slow tool, and the proxy's CPU time
is set against the wall time. Milliseconds are p50 (p95).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infra.ports import free_port
from sandbox.bench.timing import Timing, machine, since
from sandbox.proxy.client import ProxyClient, open_local
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.errors import ProxyError
from sandbox.proxy.server import running

_SIMULATOR = """
import asyncio
from sandbox.toolkit import tool

@tool
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured; CPU shares are of one core."""

    timings: list[Timing]
    num_waiting: int
    num_lost: int
    waiting_s: float
    proxy_cpu_share: float

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            machine(),
            *(timing.line() for timing in self.timings),
            f"{self.num_waiting} episodes on a 1 s tool: {self.waiting_s:.2f} s, "
            f"{self.num_lost} lost, proxy {100 * self.proxy_cpu_share:.0f} % of a core",
        ]


async def measure(num_calls: int, num_waiting: int) -> Report:
    """Run everything once in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="parl-bench-proxy-") as folder:
        port = free_port()
        server = _Api(uvicorn.Config(_api(), port=port, log_config=None, access_log=False))
        serving = asyncio.ensure_future(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            return await _measure(Path(folder), port, num_calls, num_waiting)
        finally:
            server.should_exit = True
            await serving


async def _measure(folder: Path, port: int, num_calls: int, num_waiting: int) -> Report:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        direct = await _timed("direct HTTP call", num_calls, lambda i: http.get(f"/items/{i}"))
    timings = [direct]
    async with running(_config(folder, port)) as found:
        client = ProxyClient(found.control_socket)
        try:
            local = await open_local(found.proxy, "local", "live")
            remote = await client.open_episode("remote", "live")
            replayed = await client.open_episode("record", "record")
            for name, episode in (
                ("live, in process", local),
                ("live, over the socket", remote),
                ("record, over the socket", replayed),
            ):
                timings.append(await _timed(name, num_calls, _caller(episode)))
            await found.proxy.add_world("replay", _world(folder, port, "replay"))
            again = await open_local(found.proxy, "replay", "replay")
            timings.append(await _timed("replay, in process", num_calls, _caller(again)))
            return await _waiting(client, timings, num_waiting)
        finally:
            await client.close()


async def _waiting(client: ProxyClient, timings: list[Timing], count: int) -> Report:
    """Proxy, client and simulator share this machine; the CPU time is proxy and client together,
    so the proxy's share is less than what is told."""
    episodes = [await client.open_episode(f"w{number}", "wait") for number in range(count)]
    await asyncio.gather(*(episode.call("wait", {"seconds": 0.0}) for episode in episodes))
    usage, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    results = await asyncio.gather(
        *(episode.call("wait", {"seconds": 1.0}) for episode in episodes)
    )
    wall_s = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    lost = sum(result.text != "done" for result in results)
    return Report(timings, count, lost, wall_s, cpu_s / wall_s)


def _caller(episode: Any) -> Callable[[int], Awaitable[Any]]:
    async def call(number: int) -> None:
        result = await episode.call("get_item", {"id": str(number)})
        if result.error is not None:
            raise ProxyError(f"the bench's own call failed: {result.text}")

    return call


async def _timed(name: str, count: int, call: Callable[[int], Awaitable[Any]]) -> Timing:
    timing = Timing(name)
    for number in range(count):
        begin = time.perf_counter()
        await call(number)
        timing.samples.append(since(begin))
    return timing


class _Api(uvicorn.Server):
    """Lives inside the bench's event loop: signals stay with the bench."""

    def install_signal_handlers(self) -> None:
        return


def _api() -> Starlette:
    async def item(request: Request) -> Response:
        return JSONResponse({"id": request.path_params["id"]})

    return Starlette(routes=[Route("/items/{id}", item)])


def _world(folder: Path, port: int, mode: str) -> Any:
    document = {
        "openapi": "3.0.3",
        "info": {"title": "bench", "version": "1"},
        "servers": [{"url": f"http://127.0.0.1:{port}"}],
        "paths": {
            "/items/{id}": {
                "get": {
                    "operationId": "get_item",
                    "parameters": [
                        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
                    ],
                    "responses": {"200": {"description": "ok"}},
                }
            }
        },
    }
    path = folder / "api.json"
    path.write_text(json.dumps(document))
    from sandbox.proxy.config import WorldConfig

    return WorldConfig.model_validate(
        {
            "upstreams": {
                "api": {
                    "kind": "openapi",
                    "document": path,
                    "mode": mode,
                    "cassette": folder / "cassette.jsonl",
                }
            }
        }
    )


def _config(folder: Path, port: int) -> ProxyConfig:
    (folder / "sim.py").write_text(_SIMULATOR)
    waiting = {"upstreams": {"sim": {"kind": "python", "source": folder / "sim.py"}}}
    worlds = {mode: _world(folder, port, mode) for mode in ("live", "record")}
    return ProxyConfig.model_validate(
        {
            "state_dir": folder / "state",
            "network": {"allow_addresses": [f"127.0.0.1:{port}"]},
            "quotas": {"max_calls_per_episode": 100_000},
            "worlds": {**worlds, "wait": waiting},
        }
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--waiting", type=int, default=1000)
    options = parser.parse_args()
    report = asyncio.run(measure(options.calls, options.waiting))
    sys.stdout.write("\n".join(report.lines()) + "\n")


if __name__ == "__main__":
    main()
