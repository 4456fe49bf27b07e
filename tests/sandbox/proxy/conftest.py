"""A real API server and proxies in front of it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.proxy import ToolProxy
from tests.sandbox.proxy.api import ApiServer

FAST_RETRY = {"backoff_s": 0.01, "max_attempts": 3}


@pytest.fixture(scope="module")
def _server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture
def api(_server: ApiServer) -> ApiServer:
    """The API with nothing in it."""
    _server.forget()
    return _server


def api_config(folder: Path, api: ApiServer, *, mode: str = "live", **node: Any) -> ProxyConfig:
    """A node with one world "w" whose upstream "api" is the test API; ``upstream`` adds to it."""
    upstream = {
        "kind": "openapi",
        "document": str(api.write_document(folder)),
        "mode": mode,
        "cassette": str(folder / "cassette.jsonl"),
        **node.pop("upstream", {}),
    }
    return ProxyConfig.model_validate(
        {
            "state_dir": str(folder / "state"),
            "network": {"allow_addresses": [f"127.0.0.1:{api.port}"]},
            "retry": FAST_RETRY,
            "worlds": {"w": {"upstreams": {"api": upstream}}},
            **node,
        }
    )


Body = Callable[[ToolProxy, str], Awaitable[Any]]


def with_proxy(config: ProxyConfig, body: Body, **collaborators: Any) -> Any:
    """Run ``await body(proxy, token)`` with one open episode "e" of world "w"."""

    async def go() -> Any:
        proxy = ToolProxy(config, **collaborators)
        try:
            await proxy.start()
            episode = await proxy.open_episode("e", "w", policy_version=7)
            return await body(proxy, episode.token)
        finally:
            await proxy.close()

    return asyncio.run(go())
