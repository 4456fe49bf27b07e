"""RolloutWorker: runs groups on an event loop of its own and writes the ledger as they end.

A plain synchronous class: an RLlib EnvRunner may hold one (an actor class with an ``async def``
would turn into an async actor), and so may a test or the in-process collector.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from engine.runtime.protocol import ModelRuntime
from parl.rollout.chat import Chat
from parl.rollout.episode import Hooks, OpenSession, World
from parl.rollout.group import run_group
from parl.rollout.jobs import EpisodeJob, GroupJob
from parl.rollout.settings import RolloutSettings
from parl.rollout.waits import Waits, WaitsFile
from parl.trajectory import Trajectory
from reward_models.episode import Outcome

T = TypeVar("T")


class EpisodeLedger(Protocol):
    """What a worker writes; parl.store.Store is one."""

    def mark_running(self, episode_id: str, worker: str, reason: str = "") -> int:
        """A (further) attempt begins; returns its number."""
        ...

    def finish(self, trajectory: Trajectory) -> None: ...


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What a worker hands back about an episode; everything else is in the ledger."""

    episode_id: str
    outcome: Outcome
    correctness: float | None
    num_tokens: int
    num_turns: int
    elapsed_s: float
    error: str | None


class RolloutWorker:
    """Owns an event loop, a thread for ledger writes and a file that says who waits for what."""

    def __init__(
        self,
        name: str,
        *,
        runtime: ModelRuntime,
        open_session: OpenSession,
        chat: Chat,
        ledger: EpisodeLedger,
        settings: RolloutSettings | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.name = name
        self._waits = Waits(name)
        self._world = World(runtime, open_session, chat, settings or RolloutSettings(), self._waits)
        self._ledger = ledger
        self._waits_path = None if run_dir is None else run_dir / f"waits-{name}.json"
        self._runner = asyncio.Runner()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"ledger-{name}")

    def run(
        self, groups: Sequence[GroupJob], deadline_s: float | None = None
    ) -> list[EpisodeSummary]:
        """Run every episode and return once all are finished in the ledger.

        WaitTimeout after ``deadline_s``: what was finished is in the ledger, the rest is cancelled,
        gives its boxes and contexts back and stays ``running``. LedgerError when the ledger
        cannot be written.
        """
        hooks = _LedgerHooks(self._ledger, self._writer, self.name)
        with ExitStack() as stack:
            if self._waits_path is not None:
                stack.enter_context(WaitsFile(self._waits, self._waits_path))
            work = _run_groups(groups, self._world, hooks, self.name, deadline_s)
            # summaries, not trajectories, are the task's result: Runner.run sets a signal handler,
            # and signal.signal spells the old one out, task and result included
            return self._runner.run(_summaries(work))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop (to start or close a sandbox pool, for example)."""
        return self._runner.run(work)

    def close(self) -> None:
        """Cancel what still runs and end loop and thread; idempotent."""
        self._runner.close()
        self._writer.shutdown()


async def _run_groups(
    groups: Sequence[GroupJob], world: World, hooks: Hooks, name: str, deadline_s: float | None
) -> list[Trajectory]:
    world = await _with_max_context(world, name)
    if deadline_s is None:
        return await _run_all(groups, world, hooks)
    async with world.waits.on(name, f"its {len(groups)} groups", deadline_s):
        return await _run_all(groups, world, hooks)


async def _with_max_context(world: World, name: str) -> World:
    """The engine knows how long a context may get; an episode that fills it is over budget."""
    settings = world.settings
    if settings.max_context is not None:
        return world
    async with world.waits.on(name, "engine.info", settings.step_timeout_s):
        info = await world.runtime.info()
    return replace(world, settings=replace(settings, max_context=info.max_context))


async def _run_all(groups: Sequence[GroupJob], world: World, hooks: Hooks) -> list[Trajectory]:
    """All groups at once, bounded; the first failing hook cancels the rest and is raised."""
    limit = world.settings.max_concurrent
    slots = asyncio.Semaphore(limit)
    # one group more than fits keeps the slots full while another group's last episodes end,
    # without opening the prompts of a whole round at once
    largest = max((len(group.jobs) for group in groups), default=1)
    open_groups = asyncio.Semaphore(math.ceil(limit / max(1, largest)) + 1)

    async def run(group: GroupJob) -> list[Trajectory]:
        async with open_groups:
            results = await run_group(group, world, hooks=hooks, slot=slots)
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        if len(trajectories) < len(results):
            raise next(error for error in results if isinstance(error, BaseException))
        return trajectories

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(group)) for group in groups]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [trajectory for task in running for trajectory in task.result()]


class _LedgerHooks:
    """Writes state changes in order on one thread, so that a busy ledger never stops the loop."""

    def __init__(self, ledger: EpisodeLedger, writer: ThreadPoolExecutor, worker: str) -> None:
        self._ledger = ledger
        self._writer = writer
        self._worker = worker
        self._reasons: dict[str, str] = {}

    async def started(self, job: EpisodeJob) -> None:
        reason = self._reasons.pop(job.episode_id, "")
        await self._write(self._ledger.mark_running, job.episode_id, self._worker, reason)

    async def restarted(self, job: EpisodeJob, attempt: int, error: Exception) -> None:
        self._reasons[job.episode_id] = f"{type(error).__name__}: {error}"

    async def ended(self, trajectory: Trajectory) -> None:
        await self._write(self._ledger.finish, trajectory)

    async def _write(self, fn: Callable[..., Any], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, fn, *args)


async def _summaries(work: Coroutine[Any, Any, list[Trajectory]]) -> list[EpisodeSummary]:
    return [_summary(trajectory) for trajectory in await work]


def _summary(trajectory: Trajectory) -> EpisodeSummary:
    assert trajectory.outcome is not None, f"{trajectory.episode_id}: no outcome"
    return EpisodeSummary(
        episode_id=trajectory.episode_id,
        outcome=trajectory.outcome,
        correctness=trajectory.correctness,
        num_tokens=trajectory.num_sampled,
        num_turns=len(trajectory.turns),
        elapsed_s=trajectory.elapsed_s,
        error=trajectory.error,
    )
