"""Which level this machine can enforce, and the backend for it."""

from __future__ import annotations

from typing import Any, Protocol

from sandbox.backends.base import Level, LevelReport, PooledBox
from sandbox.backends.bubblewrap import BubblewrapBackend
from sandbox.backends.plain import SubprocessBackend
from sandbox.backends.program import BoxProgram
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable


class Backend(Protocol):
    """Opens boxes of one level."""

    @property
    def level(self) -> Level: ...

    def footprint(self, box_id: str) -> dict[str, Any]: ...

    async def open(self, box_id: str, program: BoxProgram, owner: str = "") -> PooledBox: ...


_PROMISES = {
    Level.A: "namespaces, seccomp, hard memory/process/CPU limits of the whole box",
    Level.B: "namespaces, seccomp, per-process limits; no aggregate memory limit, no CPU share",
    Level.DOCKER: "hardened container: as A, seccomp of the engine too",
    Level.C: "deadline and clean environment only; no isolation (unsafe_local)",
}


def open_backend(level: Level, config: SandboxConfig) -> Backend:
    """The backend of exactly this level; BackendUnavailable says why not."""
    match level:
        case Level.A | Level.B:
            return BubblewrapBackend(config, level)
        case Level.DOCKER:
            from sandbox.backends.docker import DockerBackend

            return DockerBackend(config)
        case Level.GVISOR:
            from sandbox.backends.ray import RayBackend

            return RayBackend(config)
        case Level.C:
            return SubprocessBackend(config)
        case Level.NONE:
            raise BackendUnavailable("level none is sandbox.fakes.InProcessSession, not a backend")


def choose_backend(config: SandboxConfig) -> Backend:
    """The requested level, or with "auto" the best one; fails closed with every reason."""
    if config.level != "auto":
        return open_backend(Level(config.level), config)
    reasons = []
    for level in (Level.A, Level.B, Level.C):
        try:
            return open_backend(level, config)
        except BackendUnavailable as error:
            reasons.append(str(error))
    raise BackendUnavailable("no sandbox can run here: " + "; ".join(dict.fromkeys(reasons)))


def probe(config: SandboxConfig | None = None) -> list[LevelReport]:
    """Every level, whether it works here and why (for ``parl doctor``); starts empty boxes of A and
    B, asks the Docker engine, looks for gVisor."""
    reports = []
    for level in (Level.A, Level.B, Level.C, Level.DOCKER, Level.GVISOR):
        try:
            words = _try(level, config or SandboxConfig())
        except BackendUnavailable as error:
            reports.append(LevelReport(level, False, str(error)))
        else:
            reports.append(LevelReport(level, True, words))
    return reports


def _try(level: Level, config: SandboxConfig) -> str:
    """What the level promises here; BackendUnavailable says why it does not work."""
    if level is Level.DOCKER:
        from sandbox.backends.docker_engine import check, connected

        with connected() as client:
            return f"{_PROMISES[level]} ({check(client)})"
    if level is Level.GVISOR:
        from sandbox.backends.ray import find_runsc

        return f"gVisor sandbox of ray.experimental.sandbox ({find_runsc()})"
    open_backend(level, config)
    return _PROMISES[level]
