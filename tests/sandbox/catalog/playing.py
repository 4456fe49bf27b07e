"""Episodes of shipped families in real boxes, for the tests of this folder."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.catalog.base import Oracle
from sandbox.catalog.generated import GeneratedFamily
from sandbox.catalog.registry import get_family, list_families
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool, config_for
from sandbox.session import Observation, RawCall, Verdict
from sandbox.task import TaskSpec
from sandbox.toolkit import TaskModule

NAMES = [name for name in list_families() if name != "lookup_calc"]


@functools.cache
def family_of(name: str) -> GeneratedFamily:
    """A family of the shared kind, built once."""
    family = get_family(name)
    assert isinstance(family, GeneratedFamily)
    return family


@dataclass(frozen=True, slots=True)
class Episode:
    """What one agent saw and got."""

    spec: TaskSpec
    observations: tuple[Observation, ...]
    verdict: Verdict


Agent = tuple[TaskSpec, tuple[tuple[RawCall, ...], ...], str]
"""Task, rounds of calls, final text."""


def oracle_agent(family: GeneratedFamily, spec: TaskSpec) -> Agent:
    """The author's solution."""
    oracle: Oracle = family.oracle(spec)
    return spec, oracle.rounds, oracle.final_text


def play(family: GeneratedFamily, agents: Sequence[Agent]) -> list[Episode]:
    """One after the other on one warm box, at the best level there is here."""

    async def go() -> list[Episode]:
        config = config_for(agents[0][0], SandboxConfig(unsafe_local=True))
        pool = SandboxPool(family.bundle, size=1, leases=MemoryLeases(), config=config)
        await pool.start()
        try:
            return [await _episode(pool, *agent) for agent in agents]
        finally:
            await pool.close()

    return asyncio.run(go())


async def _episode(
    pool: SandboxPool, spec: TaskSpec, rounds: tuple[tuple[RawCall, ...], ...], final_text: str
) -> Episode:
    session = await pool.acquire(spec)
    try:
        seen = [await session.start()]
        assert seen[0].text == spec.instruction, seen[0].text
        for calls in rounds:
            seen += [await session.call(call) for call in calls]
        return Episode(spec, tuple(seen), await session.verify(final_text))
    finally:
        await session.close()


def judge(
    family: GeneratedFamily, spec: TaskSpec, final_text: str, end_state: dict[str, object]
) -> dict[str, object]:
    """The verifier's raw answer, in this process."""
    module = TaskModule(family.bundle.verify_source, "verify.py")
    answer = module.verify(final_text, end_state, spec.verifier.data)
    assert answer["reasons"], "a verdict has reasons"
    return answer


def right_end_state(spec: TaskSpec) -> dict[str, object]:
    """The end state of an agent that changed nothing, as the verifier's data has it."""
    data = spec.verifier.data
    return {key: data[key] for key in data if key.endswith("_sha256")}
