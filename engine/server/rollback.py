"""When is a canary worse than the baseline? By its errors, and by its time per token."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from pydantic import Field

from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import StepResult
from infra.config import ConfigModel


class RollbackConfig(ConfigModel):
    window: int = Field(default=500, ge=10)
    """The last steps of each arm count."""
    min_steps: int = Field(default=30, ge=1)
    """Of an arm, before it is judged."""
    error_margin: float = Field(default=0.02, gt=0, lt=1)
    """An arm is rolled back when its error rate is surely (Wilson, 97.5 %) above the baseline's by
    this much."""
    latency_ratio: float = Field(default=1.5, gt=1)
    """... or when its median time per token is above the baseline's by this factor in both halves
    of the window: one slow minute of the machine is not the arm's."""


def wilson_low(errors: int, total: int, z: float = 1.96) -> float:
    """Lower bound of an error rate (Wilson 1927)."""
    if total == 0:
        return 0.0
    p = errors / total
    centre = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return max(0.0, (centre - spread) / (1 + z * z / total))


@dataclass(slots=True, eq=False)
class Arm:
    """One engine of a split and its record: the last ``window`` steps."""

    name: str
    runtime: ModelRuntime
    weight: float
    failed: deque[bool]
    token_s: deque[float]
    """Seconds per token of steps that sampled any."""
    credit: float = 0.0
    version: int = -1
    reason: str = ""

    @classmethod
    def new(cls, name: str, runtime: ModelRuntime, weight: float, window: int) -> Arm:
        return cls(name, runtime, weight, deque(maxlen=window), deque(maxlen=window))

    def served(self, result: StepResult, seconds: float) -> None:
        self.version = result.weight_version
        self.failed.append(False)
        if len(result.token_ids):
            self.token_s.append(seconds / len(result.token_ids))

    def forget(self) -> None:
        self.failed.clear()
        self.token_s.clear()

    def worse_than(self, base: Arm, config: RollbackConfig) -> str:
        """Why, in a few words; empty when it is not, or not surely."""
        return self._errors(base, config) or self._latency(base, config)

    def _errors(self, base: Arm, config: RollbackConfig) -> str:
        errors, total = sum(self.failed), len(self.failed)
        rate = sum(base.failed) / len(base.failed) if base.failed else 0.0
        if wilson_low(errors, total) <= rate + config.error_margin:
            return ""
        return f"{errors} of {total} steps failed, {rate:.1%} on {base.name}"

    def _latency(self, base: Arm, config: RollbackConfig) -> str:
        if min(len(self.token_s), len(base.token_s)) < config.min_steps:
            return ""
        mine, middle = list(self.token_s), len(self.token_s) // 2
        usual = max(statistics.median(base.token_s), 1e-9)
        ratio = min(statistics.median(half) / usual for half in (mine[:middle], mine[middle:]))
        if ratio <= config.latency_ratio:
            return ""
        return f"a token takes {ratio:.2f} times as long as on {base.name}"
