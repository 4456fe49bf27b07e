"""What a detector says, and the limits at which it says so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WARN_AT, STOP_AT = 3, 5
"""D1 and D4: equal calls with equal results; calls that fail in the same way."""
BUSY_WARN_AT, BUSY_STOP_AT = 5, 10
"""D1 for a declared poll that does not wait; one that waits is warned at its ``max``."""
POLL_GRACE = 2
"""... and stopped this many calls later."""
CYCLE_PERIODS = range(2, 7)
CYCLE_WARN_AT, CYCLE_STOP_AT = 3, 4
"""D2, repetitions of the whole cycle."""
JITTER_WARN_AT, JITTER_STOP_AT = 4, 6
CURSOR_WARN_AT, CURSOR_STOP_AT = 6, 10
"""D3, for a field that is a declared cursor."""
JITTER_SIMILARITY = 0.85
INFRA_WARN_AT, INFRA_STOP_AT = 6, 10
STAGNATION_CALLS, STAGNATION_DISTINCT = 30, 6
"""D6."""


class LoopAction(StrEnum):
    WARN = "warn"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """What a detector says about the calls so far; ``reminder`` is one line for the model.

    ``count``: calls (D2: repetitions) of the streak; ``span``: its first and last call, 1-based.
    ``infra``: the tools' upstream fails, which is nobody's loop.
    """

    detector: str
    action: LoopAction
    count: int
    reminder: str
    span: tuple[int, int] = (0, 0)
    infra: bool = False
