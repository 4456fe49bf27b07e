"""LiveSession: one session of the server, its token, its clock and what happened in it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sandbox.errors import SandboxLost
from sandbox.server.errors import Busy, ServerError, SessionClosed, TooManyCalls, WrongState
from sandbox.server.memo import Memo
from sandbox.server.pools import PoolEntry
from sandbox.server.tokens import digest, new_token
from sandbox.server.wire import CreateSession, verdict_body
from sandbox.session import Observation, RawCall, SessionState, Stop, Verdict
from sandbox.task import TaskSpec
from sandbox.tool_session import ToolSession

T = TypeVar("T")
MAX_CALL_KEYS = 1024


class LiveSession:
    """Requests of a session run one after the other; ``end`` cancels them and closes the box.

    The session's own deadlines bound each request, ``queue_timeout_s`` the wait for earlier ones.
    """

    def __init__(
        self,
        session_id: str,
        asked: CreateSession,
        session: ToolSession,
        pool: PoolEntry,
        *,
        ttl_s: float,
        queue_timeout_s: float,
        max_queued: int,
    ) -> None:
        self.id = session_id
        self.asked = asked
        self.pool = pool
        self.ttl_s = ttl_s
        self.agent_token = new_token()
        self.token_digest = digest(self.agent_token)
        self.created_at = time.time()
        self.closed_because: str | None = None
        self.lost: str | None = None
        self.start: Observation | None = None
        self.stop: Stop | None = None
        self.verdict: Verdict | None = None
        self.calls: Memo[Observation] = Memo(MAX_CALL_KEYS)
        self.num_calls = 0
        self.errors: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()
        self.loops: list[dict[str, Any]] = []
        self._final_text: str | None = None
        self._session = session
        self._level = session.level
        self._enforced = session.enforced
        self._queue_timeout_s = queue_timeout_s
        self._max_queued = max_queued
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._last_seen = time.monotonic()
        self._ending: asyncio.Task[None] | None = None

    # -- time -----------------------------------------------------------------------------------

    @property
    def spec(self) -> TaskSpec:
        return self._session.spec

    @property
    def state(self) -> SessionState:
        return SessionState.CLOSED if self._ending is not None else self._session.state

    @property
    def open(self) -> bool:
        """Whether the agent door takes calls."""
        return self.state is SessionState.RUNNING and self.lost is None

    @property
    def idle_s(self) -> float:
        """Silence of the client; a request that still runs is no silence."""
        return 0.0 if self._running else time.monotonic() - self._last_seen

    def touch(self) -> None:
        """The client was heard of."""
        self._last_seen = time.monotonic()

    # -- work -----------------------------------------------------------------------------------

    async def begin(self) -> Observation:
        """Set the world up; SandboxLost when the box dies."""
        self.start = await self._one_by_one(self._session.start)
        self.stop = self.start.stop
        return self.start

    async def call(self, raw: RawCall) -> Observation:
        """One tool call. WrongState when the session is over, SandboxLost when its box died."""
        if len(self._running) >= self._max_queued:
            raise TooManyCalls(
                f"session {self.id}: {len(self._running)} calls wait already; wait for answers"
            )
        return await self._one_by_one(lambda: self._call(raw))

    async def verify(self, final_text: str) -> Verdict:
        """Judge once; the same final text again gets the same verdict, another one WrongState."""
        return await self._one_by_one(lambda: self._verify(final_text))

    async def end(self, because: str) -> None:
        """Cancel what runs and close the box. Idempotent; goes on when the caller is cancelled."""
        if self._ending is None:
            self.closed_because = because
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    # -- inside ---------------------------------------------------------------------------------

    async def _call(self, raw: RawCall) -> Observation:
        if self._session.state is not SessionState.RUNNING:
            why = f" ({self.stop})" if self.stop is not None else ""
            raise WrongState(
                f"session {self.id} is {self._session.state}{why}: it takes no more calls"
            )
        self.num_calls += 1
        seen = await self._session.call(raw)
        self.stop = seen.stop
        self.repairs.update(seen.repairs)
        if seen.error is not None:
            self.errors[seen.error] += 1
        if seen.loop is not None:
            span = None if seen.loop_span is None else list(seen.loop_span)
            self.loops.append({"call": self.num_calls, "verdict": seen.loop, "span": span})
        return seen

    async def _verify(self, final_text: str) -> Verdict:
        if self.verdict is None:
            if self._session.state is SessionState.VERIFIED:
                raise SandboxLost(f"session {self.id}: its box was lost during verification")
            self._final_text = final_text
            self.verdict = await self._session.verify(final_text)
        elif final_text != self._final_text:
            raise WrongState(f"session {self.id} was verified with another final_text")
        return self.verdict

    async def _one_by_one(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._ending is not None:
            raise self._cut()
        task = asyncio.ensure_future(self._in_turn(work))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._ending is None or (current is not None and current.cancelling()):
                raise
            raise self._cut() from None
        except SandboxLost as error:
            self.lost = str(error)
            raise
        finally:
            self._running.discard(task)
            self.touch()

    def _cut(self) -> ServerError:
        """Why a request got no answer. A server that stops is infrastructure, nobody's fault."""
        if self.closed_because == "shutdown":
            return Busy("the server is stopping; this session is over")
        return SessionClosed(f"session {self.id} was closed ({self.closed_because})")

    async def _in_turn(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise Busy(
                f"session {self.id}: earlier calls took longer than {self._queue_timeout_s:g} s"
            ) from None
        try:
            return await work()
        finally:
            self._turn.release()

    async def _end(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._session.close()

    # -- what the orchestrator sees -------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """A ``SessionBody``."""
        start = self.start
        return {
            "id": self.id,
            "task": self.asked.task.model_dump(),
            "name": self.spec.name,
            "task_type": self.spec.task_type,
            "content_hash": self.spec.content_hash,
            "owner": self.asked.owner,
            "state": self.state,
            "level": self._level,
            "enforced": self._enforced,
            "start_error": None if start is None or start.error is None else start.text,
            "num_calls": self.num_calls,
            "num_waiting": len(self._running),
            "errors": dict(self.errors),
            "repairs": dict(self.repairs),
            "loops": list(self.loops),
            "stop": self.stop,
            "verdict": None if self.verdict is None else verdict_body(self.verdict),
            "lost": self.lost,
            "created_at": self.created_at,
            "ttl_s": self.ttl_s,
            "idle_s": self.idle_s,
            "closed_because": self.closed_because,
        }
