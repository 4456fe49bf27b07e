"""Which level this machine can enforce, and the backend for it."""

from __future__ import annotations

from typing import Any, Protocol

from sandbox.backends.base import Level, LevelReport
from sandbox.backends.bubblewrap import BubblewrapBackend
from sandbox.backends.plain import SubprocessBackend
from sandbox.backends.process_box import ProcessBox
from sandbox.backends.program import BoxProgram
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable


class Backend(Protocol):
    """Opens boxes of one level."""

    @property
    def level(self) -> Level: ...

    def footprint(self, box_id: str) -> dict[str, Any]: ...

    async def open(self, box_id: str, program: BoxProgram) -> ProcessBox: ...


_PROMISES = {
    Level.A: "namespaces, seccomp, hard memory/process/CPU limits of the whole box",
    Level.B: "namespaces, seccomp, per-process limits; no aggregate memory limit, no CPU share",
    Level.C: "deadline and clean environment only; no isolation (unsafe_local)",
}


def open_backend(level: Level, config: SandboxConfig) -> Backend:
    """The backend of exactly this level; BackendUnavailable says why not."""
    match level:
        case Level.A | Level.B:
            return BubblewrapBackend(config, level)
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
    """Every level, whether it works here and why (for ``parl doctor``); starts empty boxes."""
    reports = []
    for level in (Level.A, Level.B, Level.C):
        try:
            open_backend(level, config or SandboxConfig())
        except BackendUnavailable as error:
            reports.append(LevelReport(level, False, str(error)))
        else:
            reports.append(LevelReport(level, True, _PROMISES[level]))
    return reports
