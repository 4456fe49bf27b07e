"""Box: one isolated process that runs a task family's code. Backends implement it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Level(StrEnum):
    """What a backend can promise (facts/sandboxes.md 6)."""

    A = "A"
    """bubblewrap + cgroup: separate namespaces, no network, hard memory/process/CPU limits."""
    B = "B"
    """bubblewrap as a non-root uid with rlimits: as A, but no aggregate memory or CPU limit."""
    DOCKER = "docker"
    """A hardened container: as A, with the engine's seccomp profile under ours."""
    GVISOR = "ray"
    """A gVisor sandbox of ray.experimental.sandbox: a kernel of its own, limits per process."""
    C = "C"
    """A plain subprocess: deadline, process group, clean environment; no isolation."""
    NONE = "none"
    """The same process (tests of the layers above)."""


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One line of ``parl doctor``."""

    level: Level
    available: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to one request.

    ``error``: None, "tool_error" (the task's own refusal, ``value`` is the text for the model),
    "timeout", "died" (the worker process was killed; ``value`` is "out of memory" where the kernel
    says so) or "crash" (an exception in the task's code; ``value`` names its class)."""

    value: Any
    error: str | None = None
    elapsed_s: float = 0.0


class Box(Protocol):
    """An in-box agent that answers one request at a time.

    Methods of the agent: ``start {data}`` forks a fresh worker and sets the world up,
    ``call {tool, arguments, max_output_bytes}``, ``end_state {}``, ``verify {final_text, end_state,
    data}``, ``reset {}`` kills the worker and empties the working directory, ``ping {}``, and the
    file methods ``list_files``, ``read_file``, ``write_file`` behind ``sandbox.extract``.
    ``end_state``, ``verify`` and ``list_files`` first kill every process of the episode and run in
    a worker forked from the clean parent: files count, a running process or Python state does not.
    """

    @property
    def level(self) -> Level: ...

    @property
    def enforced(self) -> dict[str, Any]:
        """The limits that hold, for the episode's record; None = not enforced at this level. Keys:
        ``sandbox.backends.enforced``."""
        ...

    @property
    def pid(self) -> int | None:
        """Host pid of the outermost process of the box; None when it has none of its own."""
        ...

    @property
    def alive(self) -> bool: ...

    async def request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
        """Send one request. On a missed deadline or a closed pipe the box is killed and
        SandboxLost raised; a cancelled request also kills the box, as its reply is still on the
        way."""
        ...

    async def reset(self) -> bool:
        """Back to the pristine state; False = something survived, the box must be killed."""
        ...

    async def kill(self) -> None:
        """End every process of the box and free what it held; idempotent."""
        ...


class PooledBox(Box, Protocol):
    """What ``sandbox.shelf`` needs on top."""

    @property
    def box_id(self) -> str: ...

    @property
    def worn(self) -> bool:
        """Too old to be lent again."""
        ...

    @property
    def oom_kills(self) -> int:
        """Processes of this box the kernel killed for memory so far."""
        ...
