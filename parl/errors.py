"""Errors of the top floor.

    RunError
    ├── CheckpointError   a checkpoint is missing, corrupt or of another model (exit 2)
    └── RoundError        a round cannot go on
"""

from infra.errors import ParlError


class RunError(ParlError, RuntimeError):
    """Base class."""


class CheckpointError(RunError, ValueError):
    """A checkpoint does not exist, fails its checksum or belongs to another model or run."""

    exit_code = 2


class RoundError(RunError):
    """A round cannot be finished (every attempt of an episode failed, deadline passed)."""
