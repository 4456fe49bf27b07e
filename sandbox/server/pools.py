"""PoolBook: one SandboxPool per task bundle and box size, opened when asked for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sandbox.config import SandboxConfig
from sandbox.pool import SandboxPool, config_for
from sandbox.server.config import ServerConfig
from sandbox.shelf import Leases
from sandbox.task import TaskSpec, ToolBundle


@dataclass(slots=True)
class PoolEntry:
    """A pool and how many sessions use it or are about to."""

    pool: SandboxPool
    in_use: int = 0
    idle_since: float = 0.0


class PoolBook:
    """Belongs to one event loop. Boxes open one by one as sessions need them and stay warm until
    nobody has used their pool for ``pool_idle_s``."""

    def __init__(self, config: ServerConfig, leases: Leases) -> None:
        self._config = config
        self._leases = leases
        self._entries: dict[tuple[str, SandboxConfig], PoolEntry] = {}
        self._making = asyncio.Lock()

    @property
    def entries(self) -> list[PoolEntry]:
        return list(self._entries.values())

    async def enter(self, spec: TaskSpec, bundle: ToolBundle) -> PoolEntry:
        """The pool for a task, counted as used until ``leave``; BackendUnavailable when its boxes
        cannot be isolated here."""
        key = (bundle.hash, config_for(spec, self._config.sandbox))
        async with self._making:
            if key not in self._entries:
                # choosing a level starts programs
                pool = await asyncio.to_thread(self._make, bundle, key[1])
                self._entries[key] = PoolEntry(pool)
            entry = self._entries[key]
            entry.in_use += 1
        return entry

    def leave(self, entry: PoolEntry) -> None:
        entry.in_use -= 1
        entry.idle_since = time.monotonic()

    async def close_idle(self) -> None:
        """Give the boxes up that nobody used for ``pool_idle_s``."""
        before = time.monotonic() - self._config.pool_idle_s
        for key, entry in list(self._entries.items()):
            if entry.in_use == 0 and entry.idle_since < before:
                del self._entries[key]
                await entry.pool.close()

    async def close(self) -> None:
        """Kill every box."""
        entries = self.entries
        self._entries.clear()
        await asyncio.gather(*(entry.pool.close() for entry in entries))

    def _make(self, bundle: ToolBundle, config: SandboxConfig) -> SandboxPool:
        return SandboxPool(
            bundle,
            size=self._config.max_sessions,
            leases=self._leases,
            config=config,
            num_verifiers=self._config.num_verifiers,
            lease_ttl_s=self._config.lease_ttl_s,
        )
