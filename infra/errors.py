"""Root of every error PARL raises on purpose.

    ParlError
    ├── infra:   ConfigError, LedgerError, ClusterError   (here and in the rooms)
    ├── sandbox.errors:  SandboxError ...
    ├── engine.errors:   EngineError ...
    ├── reward_models.errors: RewardError ...
    └── parl.errors:     RoundError ...

A message says what happened, the value, what was expected and what to do, in one line.
The command line prints it as is and exits with ``exit_code``; a traceback needs ``--debug``.
"""


class ParlError(Exception):
    """Base class; ``exit_code`` 2 = the user's input, 1 = everything else."""

    exit_code: int = 1


class ConfigError(ParlError, ValueError):
    """A configuration file, override or command argument is wrong."""

    exit_code = 2


class LedgerError(ParlError, OSError):
    """The ledger cannot be opened, read or written (disk full, no server, wrong schema)."""


class ClusterError(ParlError, RuntimeError):
    """Ray cannot be started or reached, or a job failed."""
