"""AlarmWatch: Alarms at work on a LightEngine behind its router, once a second.

The engine's thread does what has to be done between two of its batches; the router refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from engine.errors import ContextLost
from engine.light.alarms import Actions, AlarmConfig, Alarms, Level
from engine.light.engine import LightEngine

log = structlog.get_logger(__name__)
SUMMARIES_A_LOOK = 16
"""Blocks encoded at a time: the engine computes nothing else meanwhile."""


class AlarmWatch:
    """``refuse(why)``: take no new requests until it is called with an empty text."""

    def __init__(
        self,
        engine: LightEngine,
        config: AlarmConfig,
        refuse: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._refuse = refuse
        self._clock = clock
        self._todo: list[Callable[[], Awaitable[int]]] = []
        self.alarms = Alarms(
            config, Actions(self._shrink_hot, self._demote, self._prewarm, self._say)
        )
        self._said = ""
        self.limits = (0, 0)
        """Bytes of the hot tier and of the device above which there is an alarm."""

    async def look(self) -> Level:
        """Once: what the cache holds, then what the alarms ask for."""
        state = await self._engine.on_table(lambda table: table.cache_state())
        self.limits = (self.alarms.hot_limit(state), self.alarms.device_limit(state))
        level = self.alarms.look(state, self._clock())
        todo, self._todo = self._todo, []
        for act in todo:
            await act()
        return level

    async def run(self, every_s: float) -> None:
        """Until the engine ends or the task is cancelled."""
        while True:
            try:
                await self.look()
            except ContextLost:
                return
            await asyncio.sleep(every_s)

    def gauges(self) -> dict[str, float]:
        hot, device = self.limits
        return {
            "kv_hot_limit_bytes": hot,
            "kv_limit_bytes": device,
            "alarm_level": int(self.alarms.level),
        }

    def _say(self, why: str) -> None:
        # every look says it again
        if bool(why) != bool(self._said):
            self._refuse(why)
        self._said = why

    def _shrink_hot(self) -> None:
        self._todo.append(lambda: self._engine.on_table(lambda table: table.shrink_hot()))

    def _demote(self, num_bytes: int) -> None:
        self._todo.append(lambda: self._engine.on_table(lambda table: table.demote(num_bytes)))

    def _prewarm(self) -> None:
        self._todo.append(
            lambda: self._engine.on_table(lambda table: table.prewarm_summaries(SUMMARIES_A_LOOK))
        )
