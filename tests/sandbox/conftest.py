"""Boxes of real backends for the tests, skipped where a level does not exist."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sandbox.backends.base import Level, PooledBox
from sandbox.backends.choice import Backend, open_backend
from sandbox.backends.processes import children_of
from sandbox.backends.program import BoxProgram
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable

DOCKER = pytest.param(Level.DOCKER, marks=pytest.mark.docker)
LEVELS = [Level.A, Level.B, Level.C, DOCKER]
"""Every level the contract holds for."""
BOXED = [Level.A, Level.B, DOCKER]
"""Those that isolate."""
JUDGED = [Level.A, pytest.param(Level.B, marks=pytest.mark.slow), DOCKER]
"""The same for tests of what lies above the box, where A stands for B in the fast run."""
COUNTED = [Level.A, DOCKER]
"""Those with limits for the whole box."""

CONFIG = SandboxConfig(
    unsafe_local=True, memory_mib=128, disk_mib=8, max_processes=24, cpu_s=10, cpus=1.0
)


@cache
def backend(level: Level) -> Backend | str:
    """The backend of a level, or the reason it does not exist here."""
    try:
        return open_backend(level, CONFIG)
    except BackendUnavailable as error:
        return str(error)


def need(level: Level) -> Backend:
    """The backend, or skip with the reason."""
    found = backend(level)
    if isinstance(found, str):
        pytest.skip(f"level {level}: {found}")
    return found


RunInBox = Callable[..., Any]


@pytest.fixture
def in_box() -> RunInBox:
    """``in_box(level, source, body)``: run ``await body(box)`` on a box that holds ``source``."""

    def run(
        level: Level, source: str, body: Callable[[PooledBox], Coroutine[Any, Any, Any]]
    ) -> Any:
        async def go() -> Any:
            box = await need(level).open(secrets.token_hex(8), BoxProgram("tools.py", source))
            try:
                return await body(box)
            finally:
                await box.kill()

        return asyncio.run(go())

    return run


def host_pids(box: PooledBox) -> dict[str, int]:
    """Processes of a box on the host: its "agent" and the "outermost" one, which started it (the
    engine's shim of a container)."""
    if box.pid is None:
        agent = box.host_pid  # type: ignore[attr-defined]
        parent = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]
        return {"outermost": int(parent), "agent": agent}
    agent = box.pid if box.level is Level.C else children_of(box.pid)[0]
    return {"outermost": box.pid, "agent": agent}


def best_level() -> Level:
    """The best level here, or skip with every reason."""
    for level in (Level.A, Level.B, Level.C):
        if not isinstance(backend(level), str):
            return level
    pytest.skip("; ".join(str(backend(level)) for level in (Level.A, Level.B, Level.C)))
