"""Tools that the proxy serves, as a session calls them; and the pool's door to the proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.backends.base import Reply
from sandbox.calls.types import DecodedCall
from sandbox.config import SandboxConfig
from sandbox.errors import ProxyLost, TaskError
from sandbox.guardian import Guardian, footprint_of_folder
from sandbox.proxy.declare import ProxySpec
from sandbox.proxy.errors import CallFailure
from sandbox.proxy.result import ProxyResult
from sandbox.task import TaskSpec, ToolSpec

if TYPE_CHECKING:
    from sandbox.actors import ClusterQuotas
    from sandbox.proxy.client import ProxyClient, ProxyEpisode
    from sandbox.proxy.config import ProxyConfig
    from sandbox.proxy.proxy import ToolProxy

_OWNER = re.compile(r"(?P<episode>.*)@(?P<version>\d+)", re.DOTALL)


def split_owner(owner: str) -> tuple[str, int | None]:
    """(episode id, weight version) of an owner "ID@VERSION"; a plain id has no version."""
    found = _OWNER.fullmatch(owner)
    return (owner, None) if found is None else (found["episode"], int(found["version"]))


def check_proxy(spec: TaskSpec, config: SandboxConfig) -> None:
    """TaskError for tools that would reach a real API without ``allow_live``."""
    if spec.proxy is None or config.allow_live:
        return
    for tool, mode in spec.proxy.live.items():
        raise TaskError(
            f"task {spec.name}: tool {tool!r} has mode {mode!r}, which reaches a real API; allow "
            "it with --allow-live (a run's config: sandbox.allow_live = true), or set mode = "
            '"replay" or "simulate" in its task.toml'
        )


def node_config(config: SandboxConfig, state: Path) -> ProxyConfig:
    """The proxy of one process: the operator's proxy.toml where there is one, without its worlds.
    ConfigError."""
    from infra.config import load_config
    from sandbox.proxy.config import ProxyConfig

    node = ProxyConfig(state_dir=state)
    if config.proxy_file is not None:
        operator = load_config(
            ProxyConfig, [config.proxy_file], [f"state_dir={json.dumps(str(state))}"]
        )
        node = operator.model_copy(update={"worlds": {}})
    local = node.boxes.unsafe_local or config.unsafe_local
    return node.model_copy(update={"boxes": node.boxes.model_copy(update={"unsafe_local": local})})


@dataclass(frozen=True, slots=True)
class ProxiedTools:
    """The proxied tools of one episode."""

    spec: TaskSpec
    episode: ProxyEpisode

    def __contains__(self, tool: object) -> bool:
        return self.spec.proxy is not None and tool in self.spec.proxy.modes

    @property
    def cassettes(self) -> list[str]:
        """Digests (64 hex digits) of the cassettes when the episode began, by upstream's name."""
        return [digest for _, digest in sorted(self.episode.cassettes.items())]

    async def call(self, decoded: DecodedCall, index: int, timeout_s: float) -> Reply:
        """One call, as a box would answer it: error None, "tool_error" (the tool says so),
        "refused" (the proxy or the API says no) or "infra_error" (nobody's doing). ProxyLost."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                result = await self.episode.call(
                    decoded.tool, decoded.arguments, call_index=index, repairs=decoded.repairs
                )
        except TimeoutError:  # the call goes on in the proxy and is audited there
            late = f"no answer within {timeout_s:g} s"
            if self._tool(decoded.tool).effect != "read":
                late = _unknown(decoded.tool, late)
            return Reply(late, "infra_error", time.perf_counter() - begin)
        value, error = self._told(decoded.tool, result)
        return Reply(value, error, time.perf_counter() - begin)

    async def close(self) -> None:
        await self.episode.close()

    def _told(self, tool: str, result: ProxyResult) -> tuple[str, str | None]:
        if result.outcome == "unknown":
            return _unknown(tool, result.text), "infra_error"
        if result.infra:
            return result.text, "infra_error"
        if result.error == "tool_error":
            return result.text.removeprefix("tool_error: "), "tool_error"
        if result.error is not None:
            return result.text, "refused"
        if self._tool(tool).result_schema is None:
            return result.text, None
        # beside its JSON a text may hold the canary's line, which no schema knows
        if result.cut:
            return f"{tool} answered with more than fits an answer; ask for less", "refused"
        if result.value is None:
            return result.text, None
        return json.dumps(result.value, ensure_ascii=False), None

    def _tool(self, name: str) -> ToolSpec:
        return next(tool for tool in self.spec.tools if tool.name == name)


def _unknown(tool: str, why: str) -> str:
    why = " ".join(why.split())
    return (
        f"outcome unknown: {tool} may or may not have taken effect, its answer is lost and the "
        f"call is not sent again; look before you repeat it ({why})"
    )


class ProxyDoor:
    """Where a pool's sessions get their proxied tools. Costs nothing until a task declares some.
    Belongs to one event loop."""

    def __init__(self, config: SandboxConfig, guardian: Guardian) -> None:
        """``guardian`` removes the temporary folder of the proxy in this process if we die."""
        self._config = config
        self._guardian = guardian
        self._client: ProxyClient | None = None
        self._proxy: ToolProxy | None = None
        self._temporary: Path | None = None
        self._abandoned: dict[asyncio.Task[None], str] = {}

    async def open(self, spec: TaskSpec, owner: str) -> ProxiedTools | None:
        """The proxied tools of a new episode; None for a task without any.

        See ``check_proxy``; ProxyConfigError for a world that cannot be loaded, BackendUnavailable
        when its simulators cannot be boxed here, ProxyLost when the proxy or an upstream is gone.
        """
        if spec.proxy is None:
            return None
        check_proxy(spec, self._config)
        # an id is free again when the opening that was given up is closed
        same = [task for task, other in self._abandoned.items() if other == owner]
        if same:
            await asyncio.wait(same)
        opening = asyncio.ensure_future(self._open(spec, spec.proxy, owner))
        try:
            return ProxiedTools(spec, await asyncio.shield(opening))
        except asyncio.CancelledError:
            task = asyncio.ensure_future(_close_when_open(opening))
            self._abandoned[task] = owner
            task.add_done_callback(self._abandoned.pop)
            raise

    async def _open(self, spec: TaskSpec, proxy: ProxySpec, owner: str) -> ProxyEpisode:
        episode, version = split_owner(owner)
        episode = episode or f"session-{secrets.token_hex(8)}"
        data = spec.environment.data if proxy.simulates else None
        if self._config.proxy_socket is not None:
            client = self._at_socket(self._config.proxy_socket)
            await client.add_world(proxy.world_name, proxy.world.model_dump(mode="json"))
            return await client.open_episode(
                episode, proxy.world_name, policy_version=version, data=data, replace=True
            )
        from sandbox.proxy.client import open_local

        local = await self._in_process()
        try:
            await local.add_world(proxy.world_name, proxy.world)
            return await open_local(
                local, episode, proxy.world_name, policy_version=version, data=data
            )
        except CallFailure as failure:  # an upstream's, as the control door tells it
            raise ProxyLost(f"tool proxy: {failure.code}: {failure}") from None

    async def close(self) -> None:
        """End the proxy of this process with its episodes and programs. Idempotent."""
        while self._abandoned:
            await asyncio.wait(self._abandoned)
        proxy, self._proxy = self._proxy, None
        client, self._client = self._client, None
        if proxy is not None:
            await proxy.close()
        if client is not None:
            await client.close()
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._guardian.forget(self._temporary.name)
            self._temporary = None

    def _at_socket(self, path: Path) -> ProxyClient:
        if self._client is None:
            from sandbox.proxy.client import ProxyClient

            self._client = ProxyClient(path)
        return self._client

    async def _in_process(self) -> ToolProxy:
        if self._proxy is None:
            from sandbox.proxy.proxy import ToolProxy

            node = node_config(self._config, self._state())
            shared: ClusterQuotas | None = None
            if node.quotas.shared == "ray":
                from sandbox.actors import cluster_quotas

                shared = await asyncio.to_thread(cluster_quotas)
            if self._proxy is not None:  # another episode was quicker
                return self._proxy
            switch = None if shared is None else shared.killed
            self._proxy = ToolProxy(node, quotas=shared, kill_switch=switch)
            if self._config.proxy_file is not None:
                from sandbox.proxy.scrub import ScrubFilter
                from sandbox.proxy.server import quiet_logs

                quiet_logs(ScrubFilter(self._proxy.secrets.scrubber))
        return self._proxy

    def _state(self) -> Path:
        """One state directory for each pool: two proxies may not share one."""
        if self._config.proxy_dir is None and self._temporary is None:
            name = f"parl-proxy-{secrets.token_hex(8)}"
            self._temporary = Path(tempfile.gettempdir()) / name
            self._guardian.watch(name, footprint_of_folder(name, self._temporary))
            self._temporary.mkdir(mode=0o700)
        parent = self._temporary or self._config.proxy_dir
        assert parent is not None, "either is set"
        return parent / f"pool-{os.getpid()}-{secrets.token_hex(4)}"


async def _close_when_open(opening: asyncio.Future[ProxyEpisode]) -> None:
    """For an episode whose session nobody waits for any more."""
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()
