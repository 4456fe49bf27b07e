"""BoxProgram: which code a box runs and within which per-process limits."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from sandbox.backends import seccomp
from sandbox.backends.base import Level
from sandbox.backends.wire import files_source, toolkit_source
from sandbox.box_image import SEEDS, BoxImage
from sandbox.config import SandboxConfig
from sandbox.packages import package_sources

MIB = 1 << 20


class Code(Protocol):
    """What a box runs of a ``sandbox.task.ToolBundle``. No import: tasks know of the proxy, whose
    programs run in boxes."""

    @property
    def tools_source(self) -> str: ...

    @property
    def verify_source(self) -> str: ...

    @property
    def packages(self) -> tuple[str, ...]: ...

    @property
    def image(self) -> BoxImage | None: ...

    @property
    def verifier_image(self) -> BoxImage | None: ...


@dataclass(frozen=True, slots=True)
class BoxProgram:
    """The agent's side (tools.py) or the verifier's side (verify.py) of a task family. ``image``:
    what its containers are made of, None = the base image."""

    name: Literal["tools.py", "verify.py"]
    source: str
    packages: tuple[str, ...] = ()
    image: BoxImage | None = None

    @staticmethod
    def tools(bundle: Code) -> BoxProgram:
        return BoxProgram("tools.py", bundle.tools_source, bundle.packages, bundle.image)

    @staticmethod
    def verifier(bundle: Code) -> BoxProgram:
        return BoxProgram("verify.py", bundle.verify_source, image=bundle.verifier_image)

    def hello(self, config: SandboxConfig, level: Level, workdir: str) -> dict[str, Any]:
        """First message to the agent."""
        return {
            "toolkit": toolkit_source(),
            "files": files_source(),
            "packages": package_sources(self.packages),
            "source": self.source,
            "name": self.name,
            "workdir": workdir,
            "folders": [
                [folder.path, folder.seed and f"{SEEDS}/{folder.seed}", folder.mode]
                for folder in (self.image.folders if self.image else ())
            ],
            "own_pid_namespace": level is not Level.C,
            # a container's parent is the engine's shim, whose threads come and go
            "parent_death_signal": level in (Level.A, Level.B, Level.C),
            # bubblewrap installs the filter itself; a container has the engine's and this one
            "seccomp": b64encode(seccomp.program()).decode() if level is Level.DOCKER else "",
            "host_pid_namespace": Path("/proc/self/ns/pid").stat().st_ino,
            "rlimits": _rlimits(config, level, self.image.largest_mib if self.image else 0),
        }


def _rlimits(config: SandboxConfig, level: Level, seed_mib: int) -> dict[str, int]:
    """Names of ``resource`` -> hard and soft limit, set by the agent before any task code runs.

    RLIMIT_NPROC counts per user *namespace*, so it is set inside the box. At level C it would count
    every process of the user, and at level A and in a container the cgroup limits memory and
    processes of the whole box.
    """
    limits = {
        "RLIMIT_FSIZE": (config.disk_mib + seed_mib) * MIB,
        "RLIMIT_CPU": config.cpu_s,
        "RLIMIT_NOFILE": config.max_open_files,
        "RLIMIT_CORE": 0,
    }
    if level not in (Level.A, Level.DOCKER):
        limits["RLIMIT_AS"] = config.memory_mib * MIB
    if level is Level.B:
        limits["RLIMIT_NPROC"] = config.max_processes
    return limits
