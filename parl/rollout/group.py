"""A group: the samples of one prompt, whose KV is computed once and forked."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

import numpy as np
import structlog

from engine.errors import EngineError
from engine.runtime.types import ContextId, ContextPolicy
from parl.errors import WaitTimeout
from parl.rollout.cleanup import despite_cancel
from parl.rollout.episode import Hooks, World, run_episode
from parl.rollout.jobs import EpisodeJob, GroupJob
from parl.trajectory import Trajectory

log = structlog.get_logger(__name__)


async def run_group(
    group: GroupJob,
    world: World,
    *,
    hooks: Hooks | None = None,
    slot: AbstractAsyncContextManager[object] | None = None,
) -> list[Trajectory | BaseException]:
    """Run every episode of ``group``, each under its own draws; results in job order.

    ``slot`` (a semaphore) bounds how many episodes run at once. An exception in a result comes
    from a hook or a cancellation, never from the episode itself.
    """
    if not group.jobs:
        return []
    prompt_ids = _prompt(group, world)
    parent: ContextId | None = None

    async def run(job: EpisodeJob) -> Trajectory:
        async with slot or nullcontext():
            return await run_episode(job, world, prompt_ids=prompt_ids, parent=parent, hooks=hooks)

    try:
        if len(group.jobs) > 1 and prompt_ids is not None:
            parent = await _open_prompt(group, world, prompt_ids.tolist())
        return await asyncio.gather(*map(run, group.jobs), return_exceptions=True)
    finally:
        if parent is not None:
            await despite_cancel(_release(group, world, parent))


def _prompt(group: GroupJob, world: World) -> np.ndarray | None:
    """The prompt's ids; None when it cannot be rendered, which each episode then records."""
    try:
        return world.chat.prompt(group.jobs[0].task)
    except Exception:
        log.exception("prompt_not_rendered", group=group.key)
        return None


async def _open_prompt(group: GroupJob, world: World, prompt_ids: list[int]) -> ContextId | None:
    """The shared context; None when the engine is away, then each episode opens its own."""
    # nothing is sampled from it; the draw's task is what a router of several engines goes by
    policy = ContextPolicy(deterministic=world.settings.deterministic, draw=group.jobs[0].draw)
    try:
        async with world.waits.on(group.key, "engine.init_context", world.settings.step_timeout_s):
            return await world.runtime.init_context(prompt_ids, policy)
    except (EngineError, WaitTimeout) as error:
        log.warning("prompt_not_shared", group=group.key, error=str(error))
        return None


async def _release(group: GroupJob, world: World, parent: ContextId) -> None:
    try:
        async with world.waits.on(group.key, "engine.release", world.settings.release_timeout_s):
            await world.runtime.release(parent)
    except (EngineError, WaitTimeout) as error:
        log.warning("context_not_released", group=group.key, error=str(error))
