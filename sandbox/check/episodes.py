"""Play scripts in real boxes and keep what happened."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sandbox.check.scripts import Script
from sandbox.config import SandboxConfig
from sandbox.pool import SandboxPool, config_for
from sandbox.session import Observation, Session, Verdict
from sandbox.shelf import Leases
from sandbox.task import TaskSpec, ToolBundle


@dataclass(slots=True)
class Played:
    """One episode. ``observations`` in order; ``stop``: why the session ended it, or None."""

    agent: str
    verdict: Verdict
    observations: list[Observation] = field(default_factory=list)
    stop: str | None = None
    elapsed_s: float = 0.0
    start_text: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    @property
    def errors(self) -> list[str]:
        """Texts of the calls that failed."""
        return [seen.text for seen in self.observations if seen.error is not None]

    def summary(self) -> dict[str, Any]:
        """For the report."""
        return {
            "agent": self.agent,
            "correctness": self.verdict.correctness,
            "passed": self.passed,
            "error": self.verdict.error,
            "reasons": [reason[:200] for reason in self.verdict.reasons],
            "stop": self.stop,
            "calls": len(self.observations),
            "elapsed_s": round(self.elapsed_s, 4),
        }


async def play(session: Session, script: Script) -> Played:
    """Run the script to its end (or to the session's stop), verify, close."""
    begin = time.perf_counter()
    seen: list[Observation] = []
    try:
        first = await session.start()
        stop = first.stop
        for calls in script.rounds:
            for call in calls:
                if stop is None:
                    seen.append(await session.call(call))
                    stop = seen[-1].stop
        verdict = await session.verify(script.final_text)
    finally:
        await session.close()
    return Played(
        agent=script.name,
        verdict=verdict,
        observations=seen,
        stop=None if stop is None else stop.value,
        elapsed_s=time.perf_counter() - begin,
        start_text=first.text,
    )


class Stage:
    """Where scripts of one bundle are played."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool

    @property
    def level(self) -> str:
        return self._pool.level.value

    async def play(self, spec: TaskSpec, script: Script) -> Played:
        """One episode in a pristine box."""
        return await play(await self._pool.acquire(spec, owner="parl task check"), script)


@asynccontextmanager
async def open_stage(
    spec: TaskSpec, bundle: ToolBundle, config: SandboxConfig, leases: Leases
) -> AsyncIterator[Stage]:
    """A pool with one box, sized as the task asks, closed at the end."""
    pool = SandboxPool(bundle, size=1, leases=leases, config=config_for(spec, config))
    await pool.start()
    try:
        yield Stage(pool)
    finally:
        await pool.close()
