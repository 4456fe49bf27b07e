"""Errors of the sandbox.

SandboxError
├── TaskError          task.toml is wrong (user error, exit 2)
├── BackendUnavailable a backend cannot run here (bwrap missing, no user namespaces)
└── SandboxLost        the box died or stopped answering: infrastructure, never reward 0
    └── ProxyLost      the same of the tool proxy
"""

from infra.errors import ParlError


class SandboxError(ParlError, RuntimeError):
    """Base class."""


class TaskError(SandboxError, ValueError):
    """A task folder is not valid; names file, key, value and the nearest known key."""

    exit_code = 2


class BackendUnavailable(SandboxError):
    """The requested isolation level cannot be enforced on this machine."""


class SandboxLost(SandboxError):
    """The sandbox process died, was killed or missed its deadline."""


class ProxyLost(SandboxLost):
    """The tool proxy does not answer, or it does not know the episode any more."""
