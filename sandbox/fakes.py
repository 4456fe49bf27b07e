"""InProcessSession: a real Session without a box, for tests of the layers above.

The same tool functions, the same state machine, no isolation at all (level "none"); therefore only
for task bundles that ship with PARL.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.backends.base import Level, Reply
from sandbox.calls.decode import DEFAULT_POLICY
from sandbox.calls.policy import RepairPolicy
from sandbox.calls.table import ToolTable
from sandbox.errors import BackendUnavailable, SandboxError, SandboxLost, TaskError
from sandbox.task import TaskSpec, ToolBundle
from sandbox.tool_session import ToolSession
from sandbox.toolkit import TaskModule, run


def _memory_dir() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class InProcessBox:
    """Box protocol over a temporary directory of this process."""

    level = Level.NONE
    pid = None

    def __init__(self, bundle: ToolBundle) -> None:
        """BackendUnavailable for a bundle that is not trusted."""
        if not bundle.trusted:
            raise BackendUnavailable(
                f"task bundle {bundle.name!r} is not trusted; an in-process session has no "
                "isolation: run it in a bubblewrap pool"
            )
        self._bundle = bundle
        self.enforced: dict[str, Any] = {}  # one process enforces nothing
        # in memory where there is a place for it: tools that sync a file would wait for the disk
        self._directory = Path(tempfile.mkdtemp(prefix="parl-inprocess-", dir=_memory_dir()))
        self._tools: TaskModule | None = None
        self.alive = True

    async def request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
        """Run the request here; deadlines cannot be enforced inside one process."""
        if not self.alive:
            raise SandboxLost(f"in-process box of {self._bundle.name!r} is closed")
        if method == "verify":
            module = TaskModule(self._bundle.verify_source, "verify.py")
        else:
            if method == "start":
                self._tools = TaskModule(self._bundle.tools_source, "tools.py")
            if self._tools is None:
                raise SandboxError(f"in-process box: {method} before start")
            module = self._tools
        answer = run(module, self._directory, method, params)
        return Reply(answer["value"], answer.get("error"))

    async def reset(self) -> bool:
        """Drop the module and empty the directory."""
        self._tools = None
        shutil.rmtree(self._directory)
        self._directory.mkdir()
        return True

    async def kill(self) -> None:
        """Remove the directory; idempotent."""
        self.alive = False
        shutil.rmtree(self._directory, ignore_errors=True)


class InProcessSession(ToolSession):
    """ToolSession over an InProcessBox of its own."""

    def __init__(
        self,
        spec: TaskSpec,
        bundle: ToolBundle,
        tools: ToolTable | None = None,
        repair: RepairPolicy = DEFAULT_POLICY,
    ) -> None:
        """TaskError if ``bundle`` is not the spec's; BackendUnavailable if it is not trusted."""
        if spec.bundle != bundle.hash:
            raise TaskError(
                f"task {spec.name} needs bundle {spec.bundle[:12]}, got {bundle.hash[:12]} "
                f"({bundle.name}); load both from the same family"
            )
        box = InProcessBox(bundle)

        async def verify(params: dict[str, Any], timeout_s: float) -> Reply:
            return await box.request("verify", params, timeout_s)

        table = tools or ToolTable(spec.tools, spec.forbidden_tools)
        super().__init__(spec, table, box, verify, repair=repair)


@dataclass(slots=True)
class MemoryLease:
    """One entry of a MemoryLeases."""

    id: str
    kind: str
    ref: str
    deadline: float
    data_json: dict[str, Any]


class MemoryLeases:
    """A lease book in this process's memory: for a pool whose owner needs no ledger (tests,
    benchmarks). Nothing is left to reap from when the process dies; the parent-death signal then
    ends the boxes."""

    def __init__(self) -> None:
        self.held: dict[str, MemoryLease] = {}

    def acquire(self, kind: str, ref: str, ttl_s: float, data: dict[str, Any]) -> MemoryLease:
        """Hold (kind, ref); again = new data and deadline."""
        lease = MemoryLease(f"{kind}/{ref}", kind, ref, time.time() + ttl_s, dict(data))
        self.held[lease.id] = lease
        return lease

    def release(self, lease_id: str) -> None:
        """Twice is fine."""
        self.held.pop(lease_id, None)
