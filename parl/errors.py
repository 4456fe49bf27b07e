"""Errors of the top floor.

RunError
├── CheckpointError   a checkpoint is missing, corrupt or of another model (exit 2)
├── RoundError        a round cannot go on
├── WaitTimeout       a named wait passed its deadline
└── StaleWeights      an engine serves another policy version than the episode was issued for
"""

from typing import Any

from infra.errors import ParlError


class RunError(ParlError, RuntimeError):
    """Base class."""


class CheckpointError(RunError, ValueError):
    """A checkpoint does not exist, fails its checksum or belongs to another model or run."""

    exit_code = 2


class RoundError(RunError):
    """A round cannot be finished (every attempt of an episode failed, deadline passed)."""


class WaitTimeout(RunError, TimeoutError):
    """Somebody waited longer than allowed; ``owner`` and ``what`` say who and for what."""

    def __init__(self, owner: str, what: str, timeout_s: float) -> None:
        super().__init__(owner, what, timeout_s)
        self.owner = owner
        self.what = what
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError, TimeoutError's base, keeps only two of three arguments for pickle
        return type(self), (self.owner, self.what, self.timeout_s)

    def __str__(self) -> str:
        return (
            f"{self.owner} waited {self.timeout_s:.1f} s for {self.what} without an answer; "
            "`parl doctor` lists who waits for whom"
        )


class StaleWeights(RunError):
    """The engine's weight version is not the one the episode was issued with."""
