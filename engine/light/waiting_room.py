"""Who may run next, who waits, who is sent away: the batch router's rules, without clock or engine.

The seed's router blocked the producer on a full queue of fixed size and dead-locked under 50
clients (seed 5.4). This one never blocks: a request runs, waits in a bounded room, or is refused
with the time after which it may work.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from pydantic import Field, model_validator

from engine.errors import CapacityError, DeadlineExceeded, EngineError, Overloaded
from engine.light.rate import RateClass
from infra.config import ConfigModel


class RouterConfig(ConfigModel):
    max_running: int = Field(default=64, ge=1)
    """Requests that step at once; each is a row of the engine's batch."""
    reserved: int = Field(default=1, ge=0)
    """Of those, kept free for requests of priority ``vip_priority`` or more."""
    vip_priority: int = 1
    max_waiting: int = Field(default=200, ge=1)
    waiting_factor: int = Field(default=3, ge=1)
    """Room for min(max_waiting, waiting_factor x max_running), as the seed has it."""
    watermark: float = Field(default=0.8, gt=0, le=1)
    """Share of that room from which on the router counts as at its peak."""
    growth: float = Field(default=1.0, ge=1)
    """At the peak ``max_running`` grows by this factor, until nobody waits. The seed's worker
    growth; 1 = off. Rows of one batch are the workers here, so it helps where max_running is small:
    12 places for 50 clients gave 1,140 tokens a CPU second, 1,559 with 1.5 (engine.bench.load, part
    settings)."""
    growth_limit: float = Field(default=2.0, ge=1)
    """... up to this many times ``max_running``."""
    aging_s: float = Field(default=2.0, gt=0)
    """Waiting so long is worth one step of priority: nobody waits for ever behind others."""
    classes: dict[str, RateClass] = Field(default_factory=dict[str, RateClass])
    """Limits by ContextPolicy.rate_class; a class that is not named has none."""

    @model_validator(mode="after")
    def _leaves_room(self) -> RouterConfig:
        if self.reserved >= self.max_running:
            raise ValueError(
                f"reserved = {self.reserved} of max_running = {self.max_running} leaves nothing "
                "for the others; expected less"
            )
        return self


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. ``future`` resolves when it may run, ``kv_bytes`` is what it may grow to."""

    priority: int
    kv_bytes: int
    arrived: float
    deadline: float = math.inf
    began: float = math.nan
    future: Future[None] = field(default_factory=Future[None])

    def rank(self, now: float, aging_s: float) -> tuple[float, float]:
        """Larger runs first."""
        return self.priority + (now - self.arrived) / aging_s, -self.arrived


@dataclass(slots=True)
class RouterCounts:
    """Since the start."""

    began: int = 0
    ended: int = 0
    shed: int = 0
    expired: int = 0
    left: int = 0
    rate_limited: int = 0
    peaks: int = 0


class WaitingRoom:
    """Not thread-safe: callers hold one lock. Time is seconds of one monotonic clock."""

    def __init__(self, config: RouterConfig, kv_bytes_total: int) -> None:
        self.config = config
        self.counts = RouterCounts()
        self.closed = ""
        """Why no new request is taken; empty = open."""
        self._kv_bytes_total = kv_bytes_total
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._limit = config.max_running
        self._mean_s = 1.0
        self._at_peak = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def limit(self) -> int:
        """Requests that may run at once now."""
        return self._limit

    @property
    def room(self) -> int:
        return min(self.config.max_waiting, self.config.waiting_factor * self._limit)

    @property
    def at_peak(self) -> bool:
        """From the watermark on, until nobody waits."""
        return self._at_peak

    def enter(self, ticket: Ticket, now: float) -> None:
        """Overloaded: no room, and nobody here counts less. CapacityError: it never fits."""
        if ticket.kv_bytes > self._kv_bytes_total:
            raise CapacityError(
                f"the request may need {ticket.kv_bytes} bytes of KV cache, the engine has "
                f"{self._kv_bytes_total}: ask for fewer tokens, or give engine.num_blocks more"
            )
        self.require_open()
        self._expire(now)
        self._waiting.append(ticket)
        self.admit(now)
        # only now: a place that is kept free may have been for it, however many wait
        if ticket in self._waiting and len(self._waiting) > self.room:
            self._waiting.remove(ticket)
            if not self._send_away(ticket, now):
                self.counts.shed += 1
                raise self._overloaded()
            self._waiting.append(ticket)
        self._notice_peak()

    def require_open(self) -> None:
        """Overloaded while ``closed`` says why."""
        if self.closed:
            self.counts.shed += 1
            raise Overloaded(self.closed, self.retry_after_s())

    def admit(self, now: float) -> None:
        """Start all that may run. The first in rank holds the line until its bytes fit: smaller
        ones behind it would keep a large one out for ever."""
        self._expire(now)
        while self._waiting:
            ranked = sorted(
                self._waiting, key=lambda t: t.rank(now, self.config.aging_s), reverse=True
            )
            free = self._limit - len(self._running)
            ticket = next((t for t in ranked if free > self._kept_free(t)), None)
            used = sum(running.kv_bytes for running in self._running)
            if ticket is None or used + ticket.kv_bytes > self._kv_bytes_total:
                return
            self._waiting.remove(ticket)
            if ticket.future.set_running_or_notify_cancel():
                ticket.began = now
                self._running.add(ticket)
                self.counts.began += 1
                ticket.future.set_result(None)
        self._at_peak = False
        self._limit = self.config.max_running

    def leave(self, ticket: Ticket, now: float) -> None:
        """It ended, or gave up waiting."""
        if ticket in self._running:
            self._running.remove(ticket)
            self.counts.ended += 1
            self._mean_s += 0.1 * (now - ticket.began - self._mean_s)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            self.counts.left += 1
        self.admit(now)

    def next_deadline(self) -> float:
        return min((ticket.deadline for ticket in self._waiting), default=math.inf)

    def retry_after_s(self) -> float:
        """When those who wait now should have begun, by the mean time a request ran lately."""
        return max(1.0, math.ceil((len(self._waiting) + 1) * self._mean_s / self._limit))

    def _kept_free(self, ticket: Ticket) -> int:
        return 0 if ticket.priority >= self.config.vip_priority else self.config.reserved

    def _expire(self, now: float) -> None:
        for ticket in [t for t in self._waiting if t.deadline <= now]:
            self.counts.expired += 1
            self._end(
                ticket,
                DeadlineExceeded(
                    f"the deadline passed after {now - ticket.arrived:.1f} s of waiting; nothing "
                    "was computed"
                ),
            )

    def _send_away(self, ticket: Ticket, now: float) -> bool:
        """Refuse the last in rank in favour of ``ticket``, if it counts less."""
        if not self._waiting:
            return False
        last = min(self._waiting, key=lambda t: t.rank(now, self.config.aging_s))
        if last.rank(now, self.config.aging_s)[0] >= ticket.priority:
            return False
        self.counts.shed += 1
        self._end(last, self._overloaded())
        return True

    def _overloaded(self) -> Overloaded:
        after = self.retry_after_s()
        return Overloaded(
            f"{len(self._running)} requests run and {len(self._waiting)} wait, which is all there "
            f"is room for; try again in {after:.0f} s",
            after,
        )

    def _end(self, ticket: Ticket, error: EngineError) -> None:
        self._waiting.remove(ticket)
        if ticket.future.set_running_or_notify_cancel():
            ticket.future.set_exception(error)

    def _notice_peak(self) -> None:
        if len(self._waiting) < self.config.watermark * self.room:
            return
        if not self._at_peak:
            self._at_peak = True
            self.counts.peaks += 1
        most = int(self.config.max_running * self.config.growth_limit)
        self._limit = min(most, math.ceil(self._limit * self.config.growth))
