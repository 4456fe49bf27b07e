"""gVisor sandboxes of ``ray.experimental.sandbox`` (Ray >= 2.58, alpha), where runsc is installed.

Ray makes the sandbox (image, overlay, network none, read-only root); the agent then runs through
one long ``runsc exec``, because Ray's own ``exec`` starts a process per call, reads its whole output
into memory and on a timeout leaves the command running (facts/sandboxes.md 5.1).
"""

from __future__ import annotations

import shutil

from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable


def find_runsc() -> str:
    """Version of runsc; BackendUnavailable when it or Ray's sandbox is missing."""
    if shutil.which("runsc") is None:
        raise BackendUnavailable("ray: runsc (gVisor) is not installed on this node")
    return "runsc"


class RayBackend:
    def __init__(self, config: SandboxConfig) -> None:
        find_runsc()
        raise BackendUnavailable("ray: not yet")
