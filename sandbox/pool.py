"""SandboxPool: sessions of one task family on warm boxes.

    pool = SandboxPool(family.bundle, size=8, leases=book)
    await pool.start()
    session = await pool.acquire(family.instance(0, 0, "train", "add"), owner=episode_id)
    ...
    await session.close()          # the box is reset, checked and kept
    await pool.close()

The verifier runs in boxes of its own, where no episode ever was, and alone knows the answer.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any, cast

from sandbox.backends.base import Box, Level, PooledBox, Reply
from sandbox.backends.choice import Backend, choose_backend
from sandbox.backends.program import BoxProgram
from sandbox.calls.decode import DEFAULT_POLICY
from sandbox.calls.policy import RepairPolicy
from sandbox.calls.table import ToolTable
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, TaskError
from sandbox.guardian import Guardian
from sandbox.proxied import ProxyDoor, split_owner
from sandbox.shelf import BoxShelf, Leases, ShelfStats
from sandbox.task import TaskSpec, ToolBundle
from sandbox.tool_session import GRACE_S, ToolSession

_MAX_TABLES = 64


def config_for(spec: TaskSpec, config: SandboxConfig) -> SandboxConfig:
    """``config`` with the sizes the task asks for."""
    asked = {
        "memory_mib": spec.environment.memory_mib,
        "disk_mib": spec.environment.disk_mib,
        "cpus": spec.environment.cpus,
    }
    wanted = {key: value for key, value in asked.items() if value is not None}
    return SandboxConfig(**{**config.model_dump(), **wanted})


class SandboxPool:
    """Belongs to the event loop and thread that start it."""

    def __init__(
        self,
        bundle: ToolBundle,
        *,
        size: int,
        leases: Leases,
        config: SandboxConfig | None = None,
        num_verifiers: int = 1,
        lease_ttl_s: float = 600.0,
    ) -> None:
        """``size``: episodes at once. ``leases``: rows with this ttl; their owner renews them.

        BackendUnavailable when no permitted level works here, or level C for untrusted code.
        """
        self.config = config or SandboxConfig()
        self.bundle = bundle
        self._backend: Backend = choose_backend(self.config)
        if self._backend.level is Level.C and not bundle.trusted:
            raise BackendUnavailable(
                f"task bundle {bundle.name!r} is not trusted and level C isolates nothing: install "
                "bubblewrap (see `parl doctor`)"
            )
        self._guardian = Guardian()
        self._boxes, self._verifiers = (
            BoxShelf(self._backend, program, number, leases, lease_ttl_s, self._guardian)
            for program, number in (
                (BoxProgram.tools(bundle), size),
                (BoxProgram.verifier(bundle), num_verifiers),
            )
        )
        self._tables: dict[str, ToolTable] = {}
        self._door = ProxyDoor(self.config, self._guardian)

    @property
    def level(self) -> Level:
        """Isolation every box of this pool has."""
        return self._backend.level

    @property
    def stats(self) -> ShelfStats:
        """Counts of the boxes episodes run in."""
        return self._boxes.stats

    async def start(self) -> None:
        """Warm every box; SandboxLost with the box's last words if one does not start."""
        try:
            await self._boxes.fill()
            await self._verifiers.fill()
        except BaseException:
            await self.close()
            raise

    async def acquire(
        self,
        spec: TaskSpec,
        owner: str = "",
        timeout_s: float = 60.0,
        repair: RepairPolicy = DEFAULT_POLICY,
    ) -> ToolSession:
        """A session in a pristine box, with its proxied tools; ``owner`` (an episode id, or
        "ID@WEIGHT_VERSION") goes into the box's lease and the proxy's audit log, ``repair`` says
        how far broken calls are mended.

        TaskError when the task needs other code or other sizes than this pool's boxes have;
        SandboxError when none came free in time; SandboxLost when a new one does not start. For
        proxied tools also the errors of ``sandbox.proxied.ProxyDoor.open``.
        """
        self._check(spec)
        table = self._table(spec)
        proxied = await self._door.open(spec, owner)
        try:
            box = await self._boxes.take(split_owner(owner)[0], timeout_s)
        except BaseException:
            if proxied is not None:
                await asyncio.shield(asyncio.ensure_future(proxied.close()))
            raise
        return ToolSession(spec, table, box, self._verify, self._release, repair, proxied)

    async def close(self) -> None:
        """Kill every box and give up their leases; running sessions see SandboxLost."""
        await self._boxes.close()
        await self._verifiers.close()
        await self._door.close()
        await asyncio.to_thread(self._guardian.close)

    async def _release(self, box: Box) -> None:
        await self._boxes.give_back(cast(PooledBox, box))

    async def _verify(self, params: dict[str, Any], timeout_s: float) -> Reply:
        """One verification in a fresh worker of a verifier box."""
        box = await self._verifiers.take("verifier", timeout_s + GRACE_S)
        try:
            return await box.request(
                "verify", {**params, "timeout_s": timeout_s}, timeout_s + GRACE_S
            )
        finally:
            await self._verifiers.give_back(box)

    def _check(self, spec: TaskSpec) -> None:
        if spec.bundle != self.bundle.hash:
            raise TaskError(
                f"task {spec.name} needs bundle {spec.bundle[:12]}, this pool runs "
                f"{self.bundle.hash[:12]} ({self.bundle.name})"
            )
        if config_for(spec, self.config) != self.config:
            raise TaskError(
                f"task {spec.name} asks for {asdict(spec.environment) | {'data': '...'}}, the "
                f"boxes have memory_mib={self.config.memory_mib}, disk_mib={self.config.disk_mib}, "
                f"cpus={self.config.cpus}; open the pool with config_for(task, config)"
            )

    def _table(self, spec: TaskSpec) -> ToolTable:
        """Validators are compiled once per set of tools."""
        tools = [asdict(tool) for tool in spec.tools]
        key = json.dumps([tools, spec.forbidden_tools], sort_keys=True)
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[key] = ToolTable(spec.tools, spec.forbidden_tools)
        return self._tables[key]
