"""ToolProxy: worlds, episodes and calls of one node. The server is a shell around it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.owners import is_dead
from sandbox.proxy.audit import AuditLog, Journal
from sandbox.proxy.boxes import Boxes
from sandbox.proxy.cassette import Cassette
from sandbox.proxy.config import McpUpstream as McpConfig
from sandbox.proxy.config import OpenApiUpstream as OpenApiConfig
from sandbox.proxy.config import ProxyConfig, UpstreamConfig, WorldConfig
from sandbox.proxy.config import PythonUpstream as PythonConfig
from sandbox.proxy.episode import Episode
from sandbox.proxy.errors import (
    BadToken,
    CallIndexReused,
    ProxyConfigError,
    ProxyError,
)
from sandbox.proxy.limits import QuotaGate
from sandbox.proxy.network import AddressGuard, Resolve
from sandbox.proxy.pipeline import KillSwitch, Pipeline
from sandbox.proxy.result import Account, ProxyResult, failed_result
from sandbox.proxy.secrets import SecretStore
from sandbox.proxy.upstreams.base import Upstream
from sandbox.proxy.upstreams.http import HttpSender
from sandbox.proxy.upstreams.mcp import McpUpstream
from sandbox.proxy.upstreams.mcp_transport import http_request_of, transport_factory
from sandbox.proxy.upstreams.openapi import OpenApiUpstream
from sandbox.proxy.upstreams.simulator import PythonUpstream
from sandbox.proxy.world import Source, World, load_tools
from sandbox.quota import QuotaStore
from sandbox.tool_spec import ToolSpec

_CLOSE_WAIT_S = 10.0
_ABANDONED_WAIT_S = 2.0
"""For calls whose answer nobody waits for any more; they are audited as cancelled or done."""
_log = logging.getLogger("parl.proxy")


class ToolProxy:
    """``start``, then ``open_episode``, ``call`` and ``close_episode`` from one event loop;
    ``close`` ends every process and connection. One proxy per state directory."""

    def __init__(
        self,
        config: ProxyConfig,
        *,
        quotas: QuotaStore | None = None,
        kill_switch: KillSwitch | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """``quotas`` and ``kill_switch`` are the cluster's, where there is one; ``resolve``
        replaces the system's name resolution. ProxyConfigError: a secret that cannot be had."""
        self.config = config
        self.secrets = SecretStore(config.secrets)
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._boxes = Boxes(config.boxes)
        self._guard = AddressGuard(config.network, resolve)
        self._sender = HttpSender(self.secrets, self._guard, config.network, config.limits)
        self._hmac_key = _stored_key(config.state_dir / "idempotency.key")
        self._audit = AuditLog(config.state_dir / "audit.jsonl", self.secrets.scrubber)
        self._journal = Journal(config.state_dir / "journal.jsonl")
        self._quotas = QuotaGate(config.quotas, quotas)
        self._cluster_switch = kill_switch
        self._switch = config.kill_switch
        self._cassettes: dict[Path, Cassette] = {}
        self._worlds: dict[str, tuple[WorldConfig, asyncio.Task[World]]] = {}
        self._episodes: dict[str, Episode] = {}
        self._pipeline = Pipeline(
            config,
            scrubber=self.secrets.scrubber,
            quotas=self._quotas,
            audit=self._audit,
            journal=self._journal,
            hmac_key=self._hmac_key,
            kill_switch=self.killed,
        )

    async def start(self) -> None:
        """Load the configured worlds. ProxyConfigError, CassetteMiss, McpFailed ..."""
        for name, world in self.config.worlds.items():
            await self.add_world(name, world)

    async def add_world(self, name: str, config: WorldConfig) -> World:
        """Load a task's tools; the same again is free, another under the same name is refused."""
        if name in self._worlds:
            known, task = self._worlds[name]
            if known != config:
                raise ProxyConfigError(f"world {name!r} exists with another configuration")
            return await asyncio.shield(task)
        task = asyncio.ensure_future(self._load(name, config))
        self._worlds[name] = (config, task)
        try:
            return await asyncio.shield(task)
        except ProxyError:
            self._worlds.pop(name, None)  # a server that was down may be up next time
            raise

    async def open_episode(
        self,
        episode: str,
        world: str,
        *,
        policy_version: int | None = None,
        data: dict[str, Any] | None = None,
        replace: bool = False,
        owner: str | None = None,
    ) -> Episode:
        """A new episode; its ``token`` is all that the sandbox gets. ``data`` goes to ``setup`` of
        simulators; BackendUnavailable when those cannot be boxed here. ``replace``: an open episode
        of this id belongs to an attempt that died, and is closed. ``owner``: see
        ``close_abandoned``. ProxyError: no such world, or the id is open already."""
        if world not in self._worlds:
            raise ProxyConfigError(f"no world {world!r}; there are: {', '.join(self._worlds)}")
        loaded = await asyncio.shield(self._worlds[world][1])
        if any(tool.mode == "simulate" for tool in loaded.tools.values()):
            await asyncio.to_thread(self._boxes.check)
        for earlier in [opened for opened in self._episodes.values() if opened.id == episode]:
            if not replace:
                raise ProxyError(f"episode {episode!r} is open already; close it first")
            await self.close_episode(earlier.token)
        opened = Episode(episode, loaded, policy_version, owner=owner)
        if self.config.canary:
            mark = hmac.new(self._hmac_key, f"canary:{episode}".encode(), hashlib.sha256)
            opened.canary = f"parl-{mark.hexdigest()[:16]}"
        self._episodes[opened.token] = opened
        try:
            for source in loaded.sources.values():
                await source.upstream.open_episode(episode, data or {})
                if source.simulator is not None:
                    await source.simulator.open_episode(episode, data or {})
        except BaseException:  # nobody else knows its token
            await self.close_episode(opened.token)
            raise
        return opened

    def episode(self, token: str) -> Episode:
        """The open episode with this token. BadToken."""
        found = self._episodes.get(token)
        if found is None:
            raise BadToken("no open episode has this token")
        return found

    def tools(self, token: str) -> tuple[ToolSpec, ...]:
        """What the episode's model may call."""
        return tuple(tool.spec for tool in self.episode(token).world.tools.values())

    async def call(
        self,
        token: str,
        tool: str,
        arguments: dict[str, Any],
        *,
        call_index: int | None = None,
        repairs: Sequence[str] = (),
        policy_version: int | None = None,
    ) -> ProxyResult:
        """One call. A failure is a result with ``error`` set; only BadToken is raised.

        ``call_index`` numbers the episode's calls; the same index with the same call is the same
        call delivered again and gets the first one's result. A caller that goes away does not stop
        a call that was sent.
        """
        episode = self.episode(token)
        index = episode.next_index() if call_index is None else call_index
        try:
            task = episode.known(index, tool, arguments)
        except CallIndexReused as failure:
            return failed_result(failure, Account(), 0.0)
        if task is None:
            task = asyncio.ensure_future(
                self._pipeline.run(
                    episode,
                    index,
                    tool,
                    arguments,
                    repairs=tuple(repairs),
                    policy_version=policy_version,
                )
            )
            episode.remember(index, tool, arguments, task)
        return await asyncio.shield(task)

    async def close_abandoned(self) -> int:
        """Close the episodes whose owner, a process of this machine, is dead; how many they were.
        Nobody else would: their MCP servers and simulated states stay until then."""
        owners = {opened.owner for opened in self._episodes.values()} - {None}
        dead = {owner for owner in owners if owner is not None and is_dead(owner)}
        tokens = [token for token, opened in self._episodes.items() if opened.owner in dead]
        closing = (self.close_episode(token, _ABANDONED_WAIT_S) for token in tokens)
        for failure in await asyncio.gather(*closing, return_exceptions=True):
            if failure is not None:
                _log.error("an abandoned episode does not close: %r", failure)
        return len(tokens)

    async def close_episode(self, token: str, wait_s: float = _CLOSE_WAIT_S) -> None:
        """Let running calls end (``wait_s`` at most), then drop the episode's state; idempotent."""
        episode = self._episodes.pop(token, None)
        if episode is None:
            return
        running = episode.running()
        if running:
            _, late = await asyncio.wait(running, timeout=wait_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for source in episode.world.sources.values():
            await source.upstream.close_episode(episode.id)
            if source.simulator is not None:
                await source.simulator.close_episode(episode.id)
        self._quotas.forget(episode.id)

    async def killed(self) -> bool:
        """Whether any kill switch is on: this node's, the file's or the cluster's."""
        file = self.config.kill_switch_file
        if self._switch or (file is not None and file.exists()):
            return True
        if self._cluster_switch is None:
            return False
        try:
            return await self._cluster_switch()
        except Exception as error:  # whatever a remote switch raises: one that is lost is on
            _log.warning("kill switch: %s; taken to be on", type(error).__name__)
            return True

    def set_kill_switch(self, on: bool) -> None:
        """This node's switch."""
        self._switch = on

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    async def close(self) -> None:
        """Close every episode, world, process and file; idempotent."""
        await asyncio.gather(*(self.close_episode(token) for token in list(self._episodes)))
        worlds, self._worlds = self._worlds, {}
        for _, task in worlds.values():
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            elif not task.cancelled() and task.exception() is None:
                await task.result().close()
        await self._sender.close()
        self._audit.close()
        self._journal.close()

    async def _load(self, name: str, config: WorldConfig) -> World:
        sources: dict[str, Source] = {}
        world = World(name, sources)
        try:
            for upstream_name, upstream in config.upstreams.items():
                sources[upstream_name] = self._source(upstream_name, upstream)
            await load_tools(world, self.config.default_mode, await self.killed())
        except BaseException:
            await world.close()
            raise
        return world

    def _source(self, name: str, config: UpstreamConfig) -> Source:
        simulator = None
        if config.simulator is not None:
            python = PythonConfig(kind="python", source=config.simulator, tools=config.tools)
            simulator = PythonUpstream(name, python, self._boxes)
        cassette = None
        if config.cassette is not None:
            path = config.cassette.absolute()
            cassette = self._cassettes.setdefault(path, Cassette(path, self.secrets.scrubber))
        return Source(name, config, self._upstream(name, config), cassette, simulator)

    def _upstream(self, name: str, config: UpstreamConfig) -> Upstream:
        if isinstance(config, PythonConfig):
            return PythonUpstream(name, config, self._boxes)
        if isinstance(config, OpenApiConfig):
            return OpenApiUpstream(name, config, self.secrets, self._sender)
        return self._mcp(name, config)

    def _mcp(self, name: str, config: McpConfig) -> McpUpstream:
        node = self.config
        transport = transport_factory(
            config, self.secrets, self._guard, node.network, node.limits, self._boxes
        )

        def key() -> str:
            if config.url is None:
                return f"upstream:{name}"
            names = self.secrets.names_for(http_request_of("POST", config.url))
            return "+".join(names) or f"upstream:{name}"

        return McpUpstream(name, config, transport, node.limits, self.secrets.scrubber, key)


def _stored_key(path: Path) -> bytes:
    """32 random bytes that outlive the process: a call delivered again after a restart must have
    the key it had before."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != 32:
            raise ProxyConfigError(f"{path}: {len(key)} bytes; expected 32, delete it") from None
        return key
    key = secrets.token_bytes(32)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
    return key
