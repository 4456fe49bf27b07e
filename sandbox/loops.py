"""Result-aware loop detection (facts/sandboxes.md 4.2). D1, exact repeats; the room for the rest.

A loop is a run of equal *calls with equal results*: calling again is fine while the world answers
something new.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

WARN_AT = 3
STOP_AT = 5


class LoopAction(StrEnum):
    WARN = "warn"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """What a detector says about the calls so far; ``reminder`` is one line for the model."""

    detector: str
    action: LoopAction
    count: int
    reminder: str


def call_key(tool: str, arguments: dict[str, Any]) -> str:
    """Canonical text of a call: sorted keys, NFKC, 2.0 == 2."""
    return tool + json.dumps(_canonical(arguments), sort_keys=True, separators=(",", ":"))


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {unicodedata.normalize("NFKC", key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, str):
        return unicodedata.normalize("NFKC", value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


class LoopDetector:
    """Pure: no clock, no I/O; feed it every call that ran, in order."""

    def __init__(self, warn_at: int = WARN_AT, stop_at: int = STOP_AT) -> None:
        assert 1 < warn_at < stop_at, f"warn_at {warn_at} must be below stop_at {stop_at}"
        self._warn_at = warn_at
        self._stop_at = stop_at
        self._last: tuple[str, str] | None = None
        self._run = 0

    def record(self, tool: str, arguments: dict[str, Any], result: str) -> LoopVerdict | None:
        """Add one call and its result; a verdict when the trailing run reaches a limit.

        The warning is given once a streak, when it reaches ``warn_at``.
        """
        entry = (call_key(tool, arguments), " ".join(result.split()))
        self._run = self._run + 1 if entry == self._last else 1
        self._last = entry
        if self._run >= self._stop_at:
            action = LoopAction.STOP
        elif self._run == self._warn_at:
            action = LoopAction.WARN
        else:
            return None
        return LoopVerdict(
            detector="repeat",
            action=action,
            count=self._run,
            reminder=(
                f"reminder: {tool} was called {self._run} times with the same arguments and "
                "answered the same each time; do something else or give the final answer"
            ),
        )
