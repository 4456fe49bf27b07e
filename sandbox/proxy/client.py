"""The door for sessions: open an episode at the node's proxy and call its tools."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from infra.owners import process_owner
from sandbox.errors import ProxyLost
from sandbox.proxy.errors import BadToken, ProxyConfigError, ProxyError
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from sandbox.tool_spec import ToolSpec

_NUM_POOLS = 64
"""A pool looks at all its connections for every request: many small ones carry a thousand calls."""


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """One call of an episode, as ``ToolProxy.call`` and the control door take it."""

    tool: str
    arguments: dict[str, Any]
    call_index: int | None
    repairs: Sequence[str]
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class ProxyEpisode:
    """What a session sees of the proxy, in the same process or over the control socket.

    ``token``: what a sandbox shows at the agent door. ``cassettes``: upstream -> digest of its
    cassette when the episode was opened. ``send`` and ``end``: the way to the proxy.
    """

    token: str
    tools: tuple[ToolSpec, ...]
    cassettes: dict[str, str]
    send: Callable[[EpisodeCall], Awaitable[ProxyResult]]
    end: Callable[[], Awaitable[None]]

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        call_index: int | None = None,
        repairs: Sequence[str] = (),
        policy_version: int | None = None,
    ) -> ProxyResult:
        """One call; failures are results. ProxyLost when the proxy is gone."""
        return await self.send(EpisodeCall(tool, arguments, call_index, repairs, policy_version))

    async def close(self) -> None:
        """Idempotent."""
        await self.end()


async def open_local(
    proxy: ToolProxy,
    episode: str,
    world: str,
    *,
    policy_version: int | None = None,
    data: dict[str, Any] | None = None,
) -> ProxyEpisode:
    """Open an episode at a proxy of this process."""
    opened = await proxy.open_episode(episode, world, policy_version=policy_version, data=data)
    token = opened.token

    async def send(call: EpisodeCall) -> ProxyResult:
        try:
            return await proxy.call(
                token,
                call.tool,
                call.arguments,
                call_index=call.call_index,
                repairs=call.repairs,
                policy_version=call.policy_version,
            )
        except BadToken as error:
            raise ProxyLost(f"tool proxy: {error}") from None

    async def end() -> None:
        await proxy.close_episode(token)

    return ProxyEpisode(token, proxy.tools(token), opened.world.cassette_digests(), send, end)


class ProxyClient:
    """Control door of the node's proxy; one per process, any number of calls at once."""

    def __init__(self, control_socket: Path, timeout_s: float = 300.0) -> None:
        """``timeout_s`` of one call; longer than the proxy's own deadline."""
        self._socket = control_socket
        self._owner = process_owner()
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default one loads certificates
        self._clients = [
            httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(
                    uds=str(control_socket),
                    trust_env=False,
                    verify=no_tls,
                    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=16),
                ),
                base_url="http://proxy",
                timeout=httpx2.Timeout(timeout_s, connect=10.0),
                trust_env=False,
            )
            for _ in range(_NUM_POOLS)
        ]
        self._turns = itertools.cycle(self._clients)

    async def open_episode(
        self,
        episode: str,
        world: str,
        *,
        policy_version: int | None = None,
        data: dict[str, Any] | None = None,
        replace: bool = False,
    ) -> ProxyEpisode:
        """A new episode; ``replace`` closes one of that id that a dead process left open. The proxy
        closes it too when this process dies. ProxyLost when no proxy answers, ProxyError when it
        refuses."""
        body = {
            "episode": episode,
            "world": world,
            "policy_version": policy_version,
            "data": data or {},
            "replace": replace,
            "owner": self._owner,
        }
        answer = await self.request("POST", "/v1/episodes", body)
        tools = tuple(ToolSpec(**tool) for tool in answer["tools"])
        token = answer["token"]

        async def send(call: EpisodeCall) -> ProxyResult:
            body = {"token": token, **asdict(call), "repairs": list(call.repairs)}
            return ProxyResult(**await self.request("POST", "/v1/call", body))

        async def end() -> None:
            await self.request("DELETE", "/v1/episodes", token=token)

        return ProxyEpisode(token, tools, answer["cassettes"], send, end)

    async def add_world(self, name: str, config: dict[str, Any]) -> list[str]:
        """Names of the tools of a task's world; ``config`` is a WorldConfig as JSON."""
        answer = await self.request("POST", "/v1/worlds", {"name": name, "config": config})
        return answer["tools"]

    async def set_kill_switch(self, on: bool) -> None:
        await self.request("POST", "/v1/kill_switch", {"on": on})

    async def health(self) -> dict[str, Any]:
        """{"episodes": count, "killed": bool}."""
        return await self.request("GET", "/healthz")

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, token: str = ""
    ) -> dict[str, Any]:
        """One exchange with the control door."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            response = await next(self._turns).request(method, path, json=body, headers=headers)
        except httpx2.TransportError as error:
            raise ProxyLost(
                f"the tool proxy at {self._socket} does not answer ({type(error).__name__}); start "
                "it with python -m sandbox.proxy"
            ) from None
        answer = response.json()
        if response.status_code == 200:
            return answer
        message = f"tool proxy: {answer.get('error')}: {answer.get('message')}"
        if response.status_code in (401, 503):
            raise ProxyLost(message)
        kind = ProxyConfigError if answer.get("error") == "ProxyConfigError" else ProxyError
        raise kind(message)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
