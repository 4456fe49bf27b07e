"""SandboxService: the sessions of one server, without HTTP.

service = SandboxService(config, leases)
await service.start()                      # reaps what a killed server left
live, repeated = await service.create(CreateSession(task=FamilyTask(...)), key=None)
...
await service.stop()                       # closes every box
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Literal

import structlog

from infra.errors import LedgerError
from infra.leases import LeaseBook
from sandbox.backends.choice import choose_backend
from sandbox.calls.policy import RepairMode, RepairPolicy
from sandbox.reaper import reap_lease
from sandbox.server.config import ServerConfig
from sandbox.server.counts import Counts
from sandbox.server.errors import Busy, NotFound, SessionClosed, Unauthorized
from sandbox.server.live import LiveSession
from sandbox.server.memo import Memo
from sandbox.server.pools import PoolBook
from sandbox.server.tasks import TaskSource
from sandbox.server.tokens import digest
from sandbox.server.wire import CreateSession
from sandbox.session import Observation, RawCall, Verdict
from sandbox.shelf import LEASE_KIND

SWEEP_S = 0.5
MAX_OPENING = 8
"""Boxes that start at the same time; more would make each other late."""

log = structlog.get_logger(__name__)


class SandboxService:
    """Belongs to the event loop that starts it."""

    def __init__(self, config: ServerConfig, leases: LeaseBook) -> None:
        """BackendUnavailable when no permitted level works here, TaskError for a bad task root."""
        choose_backend(config.sandbox)
        self.config = config
        self.counts = Counts()
        self.status: Literal["ok", "starting", "stopping"] = "starting"
        self._leases = leases
        self._tasks = TaskSource(config.task_roots, config.allow_uncertified, config.sandbox)
        self._pools = PoolBook(config, leases)  # pyright: ignore[reportArgumentType] - mapped str
        self._live: dict[str, LiveSession] = {}
        self._by_token: dict[str, LiveSession] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._closed: OrderedDict[str, tuple[LiveSession, str | None]] = OrderedDict()
        self._keys: dict[str, str] = {}
        self._creates: Memo[LiveSession] = Memo(config.max_sessions + config.num_remembered)
        self._num_taken = 0
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._background: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Remove what dead owners left on this machine, then take requests."""
        handlers: Any = {LEASE_KIND: reap_lease}
        report = await asyncio.to_thread(self._leases.reap, handlers)
        if report.removed or report.failed:
            log.info("boxes_reaped", removed=len(report.removed), failed=len(report.failed))
        self._loops = [asyncio.create_task(self._sweep()), asyncio.create_task(self._renew())]
        self.status = "ok"

    async def stop(self) -> None:
        """Close every session and box; nothing new is taken. Idempotent."""
        self.status = "stopping"
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        ends = [self.close(live, "shutdown") for live in list(self._live.values())]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("session_not_closed", error=f"{type(result).__name__}: {result}")
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._pools.close()

    # -- sessions -------------------------------------------------------------------------------

    async def create(self, asked: CreateSession, key: str | None) -> tuple[LiveSession, bool]:
        """(session with its world set up, whether it is one created before with this key).

        Busy at once when every session is taken, or after ``create_timeout_s``; NotFound and
        TaskError about the task; SandboxLost, BackendUnavailable, LedgerError about the machine.
        """
        return await self._creates.once(key, asked.model_dump_json(), lambda: self._new(asked, key))

    async def call(
        self, live: LiveSession, raw: RawCall, key: str | None
    ) -> tuple[Observation, bool]:
        """(observation, whether it was repeated for this key)."""
        begin = time.perf_counter()
        seen, repeated = await live.calls.once(key, repr(raw), lambda: live.call(raw))
        if not repeated:
            self.counts.called(seen, time.perf_counter() - begin)
        return seen, repeated

    async def verify(self, live: LiveSession, final_text: str) -> Verdict:
        """See ``LiveSession.verify``."""
        first = live.verdict is None
        verdict = await live.verify(final_text)
        if first:
            self.counts.verified(verdict)
        return verdict

    async def close(self, live: LiveSession, because: str) -> None:
        """The token is worth nothing from here on. Idempotent; waits until the box is back."""
        if self._by_token.pop(live.token_digest, None) is not None:
            self.counts.closed(because)
            self._closing[live.id] = self._spawn(self._close(live, because))
        if live.id in self._closing:
            await asyncio.shield(self._closing[live.id])

    def find(self, session_id: str) -> LiveSession:
        """An open session by its id; SessionClosed, NotFound."""
        if session_id in self._closed:
            because = self._closed[session_id][0].closed_because
            raise SessionClosed(f"session {session_id} is closed ({because})")
        if session_id not in self._live:
            raise NotFound(f"no session {session_id!r}; it never was, or was closed long ago")
        return self._live[session_id]

    def find_closed(self, session_id: str) -> LiveSession:
        """What is remembered of a closed session; NotFound."""
        if session_id not in self._closed:
            raise NotFound(f"no closed session {session_id!r} is remembered")
        return self._closed[session_id][0]

    def by_token(self, token: str) -> LiveSession:
        """The open session of an agent's token; Unauthorized."""
        live = self._by_token.get(digest(token))
        if live is None:
            raise Unauthorized("the token belongs to no open session")
        return live

    def sessions(self, closed: bool) -> list[LiveSession]:
        """Open sessions or those closed not long ago, newest first."""
        if closed:
            return [live for live, _ in reversed(self._closed.values())]
        return list(reversed(self._live.values()))

    def pool_status(self) -> dict[str, Any]:
        """A ``PoolStatus``."""
        pools = []
        for entry in self._pools.entries:
            stats = entry.pool.stats
            pools.append(
                {
                    "bundle": f"{entry.pool.bundle.name}@{entry.pool.bundle.hash[:12]}",
                    "level": entry.pool.level.value,
                    "in_use": entry.in_use,
                    "opened": stats.opened,
                    "lent": stats.lent,
                    "dirty": stats.dirty,
                    "lost": stats.lost,
                }
            )
        return {
            "capacity": self.config.max_sessions,
            "in_use": self._num_taken,
            "pools": pools,
        }

    def metrics(self) -> bytes:
        """Prometheus exposition."""
        status = self.pool_status()
        return self.counts.text(self._num_taken, status["capacity"], status["pools"])

    # -- inside ---------------------------------------------------------------------------------

    async def _new(self, asked: CreateSession, key: str | None) -> LiveSession:
        if self.status != "ok":
            raise Busy(f"the server is {self.status}")
        if self._num_taken >= self.config.max_sessions:
            raise Busy(
                f"all {self.config.max_sessions} sessions are in use; close some or come back later"
            )
        self._num_taken += 1
        begin = time.perf_counter()
        try:
            live = await self._open(asked)
        except BaseException:
            self._num_taken -= 1
            raise
        if key is not None:
            self._keys[live.id] = key
        self._live[live.id] = live
        self._by_token[live.token_digest] = live
        self.counts.created(time.perf_counter() - begin)
        if live.stop is not None:
            self.counts.stopped(live.stop)
        if self.status != "ok":
            await self.close(live, "shutdown")
            raise Busy(f"the server is {self.status}")
        return live

    async def _open(self, asked: CreateSession) -> LiveSession:
        """A started session; on failure nothing is left of it."""
        timeout_s = self.config.create_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                spec, bundle = await asyncio.to_thread(self._tasks.find, asked.task)
                async with self._opening:
                    pool = await self._pools.enter(spec, bundle)
                    try:
                        return await self._begin(asked, pool, spec)
                    except BaseException:
                        self._pools.leave(pool)
                        raise
        except TimeoutError:
            raise Busy(f"no session within {timeout_s:g} s: the machine is overloaded") from None

    async def _begin(self, asked: CreateSession, pool: Any, spec: Any) -> LiveSession:
        session_id = secrets.token_hex(12)
        session = await pool.pool.acquire(
            spec,
            owner=asked.owner or session_id,
            timeout_s=self.config.create_timeout_s,
            repair=RepairPolicy(RepairMode(asked.repair)),
        )
        try:
            live = LiveSession(
                session_id,
                asked,
                session,
                pool,
                ttl_s=min(asked.ttl_s or self.config.ttl_s, self.config.max_ttl_s),
                queue_timeout_s=self.config.queue_timeout_s,
                max_queued=self.config.max_queued_calls,
            )
            await live.begin()
        except BaseException:
            await session.close()
            raise
        return live

    async def _close(self, live: LiveSession, because: str) -> None:
        """Runs once per session: the slot is free only when the box is."""
        try:
            await live.end(because)
        finally:
            self._num_taken -= 1
            self._pools.leave(live.pool)
            del self._live[live.id], self._closing[live.id]
            self._closed[live.id] = (live, self._keys.pop(live.id, None))
            while len(self._closed) > self.config.num_remembered:
                _, (_, key) = self._closed.popitem(last=False)
                self._creates.forget(key)

    async def _sweep(self) -> None:
        """Close the sessions of silent clients and the boxes nobody wants."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for live in list(self._by_token.values()):
                if live.idle_s > live.ttl_s:
                    log.warning("session_silent", session=live.id, ttl_s=live.ttl_s)
                    self._spawn(self.close(live, "ttl"))
            self._spawn(self._pools.close_idle())

    async def _renew(self) -> None:
        """Keep the leases of the boxes; a ledger that is away for a while loses none."""
        while True:
            await asyncio.sleep(self.config.lease_ttl_s / 4)
            try:
                await asyncio.to_thread(self._leases.renew_all, self.config.lease_ttl_s)
            except LedgerError as error:
                log.warning("leases_not_renewed", error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside; a failure is logged, for maybe nobody waits for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_failed", error=f"{type(error).__name__}: {error}")
