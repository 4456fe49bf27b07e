"""BoxShelf: warm boxes of one program, lent out one at a time and checked when they come back."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from infra.owners import process_owner
from sandbox.backends.base import PooledBox
from sandbox.backends.choice import Backend
from sandbox.backends.program import BoxProgram
from sandbox.errors import SandboxError, SandboxLost
from sandbox.guardian import Guardian
from sandbox.reaper import process_host

LEASE_KIND = "box"


class HeldLease(Protocol):
    """One lease row."""

    @property
    def id(self) -> str: ...


class Leases(Protocol):
    """What a pool needs of ``infra.leases.LeaseBook``. ``acquire`` of a lease already held by this
    owner replaces its data and moves its deadline."""

    def acquire(self, kind: str, ref: str, ttl_s: float, data: dict[str, Any]) -> HeldLease: ...

    def release(self, lease_id: str) -> None: ...


@dataclass(slots=True)
class ShelfStats:
    """Counts since the shelf was made."""

    opened: int = 0
    lent: int = 0
    dirty: int = 0
    """Boxes thrown away because something survived their reset."""
    lost: int = 0
    """Boxes that had died by the time they came back."""


class BoxShelf:
    """At most ``size`` boxes. A dead or soiled box is replaced at the next ``take``."""

    def __init__(
        self,
        backend: Backend,
        program: BoxProgram,
        size: int,
        leases: Leases,
        ttl_s: float,
        guardian: Guardian,
    ) -> None:
        assert size > 0, f"a shelf holds at least one box, not {size}"
        self._backend = backend
        self._program = program
        self._size = size
        self._leases = leases
        self._ttl_s = ttl_s
        self._guardian = guardian
        self._room = asyncio.Semaphore(size)
        self._idle: list[PooledBox] = []
        self._lease_ids: dict[str, str] = {}
        self._out: set[PooledBox] = set()
        self._closed = False
        self.stats = ShelfStats()

    async def fill(self) -> None:
        """Open boxes until ``size`` are warm; after a failure the ones already open stay."""

        async def warm() -> None:
            self._idle.append(await self._open(""))

        missing = self._size - len(self._idle) - len(self._out)
        done = await asyncio.gather(*(warm() for _ in range(missing)), return_exceptions=True)
        for failure in done:
            if failure is not None:
                raise failure

    async def take(self, owner: str, timeout_s: float) -> PooledBox:
        """A pristine box; SandboxError when none came free in time. The lease names ``owner``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire()
        except TimeoutError as error:
            raise SandboxError(
                f"no box came free within {timeout_s:g} s: all {self._size} are in use; make the "
                "pool larger or run fewer episodes at once"
            ) from error
        try:
            box = await self._idle_or_new(owner)
        except BaseException:
            self._room.release()
            raise
        self._out.add(box)
        self.stats.lent += 1
        return box

    async def give_back(self, box: PooledBox) -> None:
        """Reset the box and keep it; a dead one, or one that is not pristine, is thrown away."""
        assert box in self._out, f"box {box.box_id} was not lent by this shelf"
        try:
            clean = box.alive and await box.reset()
            if not clean and box.alive:
                self.stats.dirty += 1
            elif not clean:
                self.stats.lost += 1
        except SandboxLost:
            self.stats.lost += 1
            clean = False
        try:
            if clean and not self._closed and not box.worn:
                self._idle.append(box)
            else:
                await self._discard(box)
        finally:
            self._out.discard(box)
            self._room.release()

    async def close(self) -> None:
        """Kill every box, lent ones too (their sessions see SandboxLost)."""
        self._closed = True
        boxes = [*self._idle, *self._out]
        self._idle.clear()
        await asyncio.gather(*(self._discard(box) for box in boxes))

    async def _idle_or_new(self, owner: str) -> PooledBox:
        if self._closed:
            raise SandboxError("the pool is closed")
        while self._idle:
            box = self._idle.pop()
            if box.alive and not box.worn:
                try:
                    await asyncio.to_thread(self._lease, box.box_id, box.pid, owner)
                except BaseException:
                    await self._discard(box)
                    raise
                return box
            if not box.alive:
                self.stats.lost += 1
            await self._discard(box)
        return await self._open(owner)

    async def _open(self, owner: str) -> PooledBox:
        """Lease first, then the process, then the pid into the lease."""
        box_id = secrets.token_hex(8)
        lease = await asyncio.to_thread(self._lease, box_id, None, owner)
        self._lease_ids[box_id] = lease.id
        self._guardian.watch(box_id, self._lease_data(box_id, None, owner))
        try:
            box = await self._backend.open(box_id, self._program, owner)
        except BaseException:
            # open leaves nothing behind when it fails
            self._guardian.forget(box_id)
            await asyncio.to_thread(self._leases.release, self._lease_ids.pop(box_id))
            raise
        try:
            await asyncio.to_thread(self._lease, box_id, box.pid, owner)
        except BaseException:
            await self._discard(box)
            raise
        self.stats.opened += 1
        return box

    def _lease(self, box_id: str, pid: int | None, owner: str) -> HeldLease:
        data = self._lease_data(box_id, pid, owner)
        return self._leases.acquire(LEASE_KIND, box_id, self._ttl_s, data)

    def _lease_data(self, box_id: str, pid: int | None, owner: str) -> dict[str, Any]:
        return {
            "box_id": box_id,
            "host": process_host(),
            "process": None if pid is None else process_owner(pid),
            "owner": owner,
            **self._backend.footprint(box_id),
        }

    async def _discard(self, box: PooledBox) -> None:
        """Kill the box, then give its lease up."""
        await box.kill()
        self._guardian.forget(box.box_id)
        lease_id = self._lease_ids.pop(box.box_id, None)
        if lease_id is not None:
            await asyncio.to_thread(self._leases.release, lease_id)
