"""What the detectors look at: the calls of an episode, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sandbox.loops.fingerprint import is_no_information


@dataclass(frozen=True, slots=True)
class Call:
    """One call that ran; ``entry`` = (call, result), equal for the same thing done again."""

    number: int
    tool: str
    arguments: dict[str, Any]
    entry: tuple[str, str]
    error: str | None
    result: str

    @property
    def says_nothing(self) -> bool:
        return self.error is not None or is_no_information(self.entry[1])


@dataclass(slots=True)
class Turn:
    """The calls of one assistant turn; their sorted set is what the detectors compare."""

    turn: int | None
    time_s: float | None
    calls: list[Call]
    key: tuple[tuple[str, str], ...] = ()
    jitter: str | None = None
    """Field in which its only call differs from the only call of the turn before; see D3."""

    def settle(self) -> None:
        self.key = tuple(sorted({call.entry for call in self.calls}))

    @property
    def single(self) -> Call | None:
        return self.calls[-1] if len(self.key) == 1 else None

    @property
    def error(self) -> str | None:
        """The one error all its calls ended in."""
        errors = {call.error for call in self.calls}
        return errors.pop() if len(errors) == 1 else None
