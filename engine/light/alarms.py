"""Alarms that act: yellow, orange and red by what the KV cache holds (seed 4.3).

The seed's numbers were of one machine (0.65, 12 GB, 65 GB). Here yellow is relative to what the
profile can reach, since 8-bit codes alone never save more than half, and the limits are shares of
what this engine was given unless bytes are named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import structlog
from pydantic import Field

from infra.config import ConfigModel

log = structlog.get_logger(__name__)


class Level(IntEnum):
    NONE = 0
    YELLOW = 1
    ORANGE = 2
    RED = 3


class AlarmConfig(ConfigModel):
    compression_margin: float = Field(default=0.05, gt=0, lt=1)
    """Yellow: the warm tier saves this much less of bf16 than its profile can."""
    hot_bytes: int = Field(default=0, ge=0)
    """Orange: bytes in full precision; 0 = ``hot_share`` of the pool."""
    hot_share: float = Field(default=0.9, gt=0, le=1)
    total_bytes: int = Field(default=0, ge=0)
    """Red: bytes on the device; 0 = ``total_share`` of the pools."""
    total_share: float = Field(default=0.95, gt=0, le=1)
    clear_share: float = Field(default=0.9, gt=0, lt=1)
    """An alarm ends below this share of its limit: between the two it stays as it is."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """Bytes an engine's KV cache holds. ``warm_bf16``: what the warm tokens would take in bf16;
    ``expected_saving``: 1 - bytes / bf16 bytes of a full warm block in this profile."""

    hot: int
    warm: int
    cold: int
    warm_bf16: int
    expected_saving: float
    hot_total: int
    device_total: int

    @property
    def warm_saving(self) -> float:
        """k25_warm_compression_ratio; what is expected while nothing is warm."""
        return 1 - self.warm / self.warm_bf16 if self.warm_bf16 else self.expected_saving


@dataclass(frozen=True, slots=True)
class Alarm:
    level: Level
    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class Actions:
    """What the engine's owner lets an alarm do. ``demote``: bytes that should leave the device;
    ``refuse("")`` ends a refusal."""

    shrink_hot: Callable[[], None]
    demote: Callable[[int], None]
    prewarm_summaries: Callable[[], None]
    refuse: Callable[[str], None]


@dataclass(slots=True)
class Alarms:
    """Fed with the cache's state every second or so. Orange and red act at each look while they
    last, since one shrink or one demotion may not be enough."""

    config: AlarmConfig
    actions: Actions
    raised: dict[Level, Alarm] = field(default_factory=dict[Level, Alarm])
    num_raised: dict[Level, int] = field(default_factory=dict[Level, int])

    @property
    def level(self) -> Level:
        return max(self.raised, default=Level.NONE)

    def look(self, state: CacheState, now: float) -> Level:
        """Raise, clear and act; returns the highest level. ``now``: seconds."""
        missing = state.expected_saving - state.warm_saving
        self._set(
            Level.YELLOW,
            missing,
            self.config.compression_margin,
            now,
            f"the warm tier saves {state.warm_saving:.1%} of bf16, its profile can save "
            f"{state.expected_saving:.1%}: look at the profile and at half-filled blocks",
        )
        limit = self.hot_limit(state)
        self._set(
            Level.ORANGE,
            state.hot,
            limit,
            now,
            f"{state.hot} bytes in full precision, the limit is {limit}: shrinking the hot zone",
        )
        device = state.hot + state.warm
        limit = self.device_limit(state)
        self._set(
            Level.RED,
            device,
            limit,
            now,
            f"{device} bytes of KV cache, the limit is {limit}: moving blocks to the cold tier and "
            "taking no new contexts",
        )
        self._act(device - int(self.config.clear_share * limit))
        return self.level

    def hot_limit(self, state: CacheState) -> int:
        return self.config.hot_bytes or int(self.config.hot_share * state.hot_total)

    def device_limit(self, state: CacheState) -> int:
        return self.config.total_bytes or int(self.config.total_share * state.device_total)

    def _set(self, level: Level, value: float, limit: float, now: float, reason: str) -> None:
        held = level in self.raised
        if value > limit and not held:
            self.raised[level] = Alarm(level, now, reason)
            self.num_raised[level] = self.num_raised.get(level, 0) + 1
            log.warning("kv_alarm", level=level.name.lower(), reason=reason)
        elif held and value <= self.config.clear_share * limit:
            began = self.raised.pop(level).since
            log.info("kv_alarm_over", level=level.name.lower(), seconds=round(now - began, 1))
            if level is Level.RED:
                self.actions.refuse("")

    def _act(self, too_many: int) -> None:
        if Level.ORANGE in self.raised:
            self.actions.shrink_hot()
        if Level.RED in self.raised:
            # refuse first: what follows takes time in which others would come in
            self.actions.refuse(self.raised[Level.RED].reason)
            self.actions.demote(too_many)
            self.actions.prewarm_summaries()
