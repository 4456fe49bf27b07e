"""The agent loop: one coroutine an episode, from prompt to verdict.

sample a turn -> find the calls in its ids -> run them in order -> append the answers -> again,
until a turn without calls is the final answer. A bad rollout is data, not a crash: how an episode
ended is classified once, in ``run_episode``, and recorded on the trajectory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from engine.errors import CapacityError, ContextLost, EngineError
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextId, ContextPolicy, StepResult
from parl.errors import RunError, StaleWeights, WaitTimeout
from parl.rollout.chat import Chat, ChatCall, Reply
from parl.rollout.cleanup import despite_cancel
from parl.rollout.context import Deadline, EpisodeContext
from parl.rollout.failures import Failure, failure_of, failure_of_calls
from parl.rollout.jobs import EpisodeJob
from parl.rollout.settings import RolloutSettings
from parl.rollout.waits import Waits
from parl.trajectory import OUTCOME_OF_STOP, ToolCallRecord, Trajectory, Turn
from reward_models.episode import UNSCORED, Outcome
from sandbox.calls.policy import RepairPolicy
from sandbox.errors import SandboxError, SandboxLost
from sandbox.loops import repeated_suffix
from sandbox.session import RawCall, Session, Stop
from sandbox.task import TaskSpec

log = structlog.get_logger(__name__)


class OpenSession(Protocol):
    """Where sessions come from; a SandboxPool's ``acquire`` is one."""

    def __call__(
        self, spec: TaskSpec, owner: str = "", *, repair: RepairPolicy = ...
    ) -> Awaitable[Session]:
        """A new session; ``owner`` (an episode id) goes into the lease, ``repair`` says how far
        broken calls are mended."""
        ...


RESTARTABLE = (SandboxLost, ContextLost, CapacityError, StaleWeights, WaitTimeout)
"""The world broke, not the policy: the episode starts again with the same draws."""

SESSION_GRACE_S = 10.0
_CALL = "sandbox.call"
_VERIFY = "sandbox.verify"


@dataclass(frozen=True, slots=True)
class World:
    """Everything an episode acts in; shared by all episodes of a worker."""

    runtime: ModelRuntime
    open_session: OpenSession
    chat: Chat
    settings: RolloutSettings
    waits: Waits


class Hooks(Protocol):
    """Who is told about an episode's state changes; an exception here ends the worker's run."""

    async def started(self, job: EpisodeJob) -> None:
        """An attempt begins."""
        ...

    async def restarted(self, job: EpisodeJob, attempt: int, error: Exception) -> None:
        """Attempt ``attempt`` failed for a reason in RESTARTABLE and another one follows."""
        ...

    async def ended(self, trajectory: Trajectory) -> None:
        """The episode has an outcome."""
        ...


class NoHooks:
    """Nobody is told."""

    async def started(self, job: EpisodeJob) -> None: ...

    async def restarted(self, job: EpisodeJob, attempt: int, error: Exception) -> None: ...

    async def ended(self, trajectory: Trajectory) -> None: ...


async def run_episode(
    job: EpisodeJob,
    world: World,
    *,
    prompt_ids: np.ndarray | None = None,
    parent: ContextId | None = None,
    hooks: Hooks | None = None,
) -> Trajectory:
    """Run one episode to an outcome; only cancellation and failing hooks raise.

    ``parent`` is a context that holds exactly ``prompt_ids`` and is forked rather than refilled.
    After ``settings.max_attempts`` infrastructure failures, or at once for an error nobody
    expected, the outcome is infra_error with correctness None, the cause in ``error`` and its kind
    in ``failure``.
    """
    hooks = hooks or NoHooks()
    begin = time.perf_counter()
    trajectory = _blank(job, np.zeros(0, np.int32))
    for attempt in range(1, world.settings.max_attempts + 1):
        await hooks.started(job)
        try:
            if prompt_ids is None:
                prompt_ids = world.chat.prompt(job.task)
            trajectory = _blank(job, prompt_ids)
            await _attempt(job, world, trajectory, parent)
            break
        except RESTARTABLE as error:
            _fail(trajectory, failure_of(error), f"attempt {attempt}: {_one_line(error)}")
            if attempt == world.settings.max_attempts:
                log.error("episode_failed", episode=job.episode_id, error=trajectory.error)
                break
            log.warning("episode_restarted", episode=job.episode_id, error=trajectory.error)
            await hooks.restarted(job, attempt, error)
            await asyncio.sleep(world.settings.backoff_s * 2 ** (attempt - 1))
        except Exception as error:
            # ours to fix; another attempt would meet it again, other episodes may not
            _fail(trajectory, failure_of(error), _one_line(error))
            log.exception("episode_failed", episode=job.episode_id)
            break
    trajectory.elapsed_s = time.perf_counter() - begin
    await hooks.ended(trajectory)
    return trajectory


async def _attempt(
    job: EpisodeJob, world: World, trajectory: Trajectory, parent: ContextId | None
) -> None:
    """One try: fills ``trajectory``; gives box and context back however it ends."""
    deadline = Deadline(job.limits.deadline_s)
    context = EpisodeContext(
        world.runtime,
        ContextPolicy(deterministic=world.settings.deterministic, draw=job.draw),
        trajectory.prompt_ids,
        owner=job.episode_id,
        waits=world.waits,
        settings=world.settings,
        deadline=deadline,
        parent=parent,
        weight_version=job.weight_version,
    )
    session: Session | None = None
    try:
        async with _waiting(world, job, "sandbox.open", world.settings.start_timeout_s, deadline):
            session = await world.open_session(job.task, _owner(job), repair=job.repair)
        start_s = world.settings.start_timeout_s + job.task.limits.setup_timeout_s
        async with _waiting(world, job, "sandbox.start", start_s, deadline):
            started = await session.start()
        trajectory.sandbox = session.enforced
        if started.stop is not None:
            outcome = OUTCOME_OF_STOP[started.stop]
            trajectory.error = started.text
        else:
            outcome = await _converse(job, world, trajectory, context, session, deadline)
        await _judge(job, world, trajectory, outcome, session)
        trajectory.check()
    finally:
        await despite_cancel(_give_back(world, job, context, session))


async def _converse(
    job: EpisodeJob,
    world: World,
    trajectory: Trajectory,
    context: EpisodeContext,
    session: Session,
    deadline: Deadline,
) -> Outcome:
    """Turns until something ends the episode; says what."""
    limits = job.limits
    while True:
        room = _room(job, world, trajectory, context)
        if room <= 0:
            return Outcome.TOKEN_BUDGET
        result = await context.step(room, job.sampling, world.chat.stop_ids)
        if result.finish == "cancelled":
            return Outcome.CANCELLED
        reply = world.chat.read(result.token_ids)
        if result.finish == "length":
            trajectory.turns.append(_turn(result))
            trajectory.final_text = reply.text
            # D7 of facts/sandboxes.md 4.2: a turn that never ends because it repeats itself
            looped = repeated_suffix(result.token_ids.tolist(), text=reply.text)
            return Outcome.TOKEN_BUDGET if looped is None else Outcome.LOOP
        if not reply.calls:
            trajectory.turns.append(_turn(result))
            trajectory.final_text = reply.text
            return Outcome.COMPLETED
        if len(trajectory.turns) + 1 >= limits.max_turns:
            trajectory.turns.append(_turn(result))
            return Outcome.TURN_LIMIT
        try:
            answers, stop = await _run_calls(job, world, trajectory, reply, session, deadline)
        except WaitTimeout:
            if not deadline.passed:
                raise
            trajectory.turns.append(_turn(result))
            return Outcome.AGENT_TIMEOUT
        if stop is not None:
            trajectory.turns.append(_turn(result))
            if stop in (Stop.ENV_ERROR, Stop.INFRA_ERROR):
                trajectory.error = answers[-1][1]
            if stop is Stop.INFRA_ERROR:
                trajectory.failure = failure_of_calls(answers[-1][1])
            return OUTCOME_OF_STOP[stop]
        observed = world.chat.answer(answers)
        trajectory.turns.append(_turn(result, observed))
        context.append(observed)


async def _run_calls(
    job: EpisodeJob,
    world: World,
    trajectory: Trajectory,
    reply: Reply,
    session: Session,
    deadline: Deadline,
) -> tuple[list[tuple[ChatCall, str]], Stop | None]:
    """The calls of one turn, in order; those after a stop are not run."""
    answers: list[tuple[ChatCall, str]] = []
    # the session enforces the task's limit; a wait that passes both means that the session hangs
    call_s = max(world.settings.call_timeout_s, job.task.limits.call_timeout_s + SESSION_GRACE_S)
    for index, call in enumerate(reply.calls):
        async with _waiting(world, job, _CALL, call_s, deadline):
            seen = await session.call(
                RawCall(call.name_text, call.arguments_text, turn=len(trajectory.turns))
            )
        if seen.media:
            raise RunError(
                f"{job.episode_id}: tool {seen.tool} answered with {len(seen.media)} media; this "
                "loop handles text only, so return text from the tool"
            )
        trajectory.calls.append(
            ToolCallRecord(
                turn=len(trajectory.turns),
                index=index,
                name_text=call.name_text,
                arguments_text=call.arguments_text,
                tool=seen.tool,
                arguments=seen.arguments,
                observation=seen.text,
                error=seen.error,
                repairs=seen.repairs,
                elapsed_s=seen.elapsed_s,
            )
        )
        answers.append((call, seen.text))
        if seen.stop is not None:
            return answers, seen.stop
    return answers, None


async def _judge(
    job: EpisodeJob, world: World, trajectory: Trajectory, outcome: Outcome, session: Session
) -> None:
    """Outcome and correctness. Only a completed episode has an answer to verify; other scored
    ones are worth 0. The verifier has its own deadline: the agent's clock has stopped."""
    trajectory.outcome = outcome
    if outcome is not Outcome.COMPLETED:
        trajectory.correctness = None if outcome in UNSCORED else 0.0
        return
    try:
        async with world.waits.on(job.episode_id, _VERIFY, world.settings.verify_timeout_s):
            verdict = await session.verify(trajectory.final_text)
    except WaitTimeout as error:
        trajectory.outcome, trajectory.error = Outcome.VERIFIER_ERROR, str(error)
        return
    trajectory.verdict_reasons = verdict.reasons
    if verdict.correctness is None or verdict.error is not None:
        trajectory.outcome = Outcome.VERIFIER_ERROR
        trajectory.error = verdict.error or "the verifier gave no correctness"
        return
    trajectory.correctness = verdict.correctness


async def _give_back(
    world: World, job: EpisodeJob, context: EpisodeContext, session: Session | None
) -> None:
    """Release what the attempt held. A failure here is logged; the lease reaper finishes it."""
    try:
        await context.release()
    except (EngineError, WaitTimeout) as error:
        log.warning("context_not_released", episode=job.episode_id, error=_one_line(error))
    if session is None:
        return
    try:
        async with world.waits.on(
            job.episode_id, "sandbox.close", world.settings.release_timeout_s
        ):
            await session.close()
    except (SandboxError, WaitTimeout) as error:
        log.warning("sandbox_not_closed", episode=job.episode_id, error=_one_line(error))


def _owner(job: EpisodeJob) -> str:
    """The episode, and for the audit log of proxied tools the weights that call them."""
    if job.task.proxy is None or job.weight_version < 0:
        return job.episode_id
    return f"{job.episode_id}@{job.weight_version}"


def _room(job: EpisodeJob, world: World, trajectory: Trajectory, context: EpisodeContext) -> int:
    """Tokens the next turn may sample."""
    room = min(job.limits.max_tokens_per_turn, job.limits.max_tokens - trajectory.num_sampled)
    if world.settings.max_context is not None:
        room = min(room, world.settings.max_context - len(context))
    return room


def _waiting(world: World, job: EpisodeJob, what: str, timeout_s: float, deadline: Deadline):
    return world.waits.on(job.episode_id, what, deadline.within(timeout_s))


def _turn(result: StepResult, observed: np.ndarray | None = None) -> Turn:
    return Turn(
        sampled_ids=result.token_ids.astype(np.int32),
        logprobs=result.logprobs.astype(np.float32),
        loss_mask=np.ones(len(result.token_ids), np.uint8),
        observation_ids=np.zeros(0, np.int32) if observed is None else observed.astype(np.int32),
        weight_version=result.weight_version,
        finish=result.finish,
        experts=result.experts,
        experts_start=result.experts_start,
        selections=result.selections,
        warm_reads=result.warm_reads,
        retrieved=result.retrieved,
        codes=result.codes,
        codes_start=result.codes_start,
    )


def _blank(job: EpisodeJob, prompt_ids: np.ndarray) -> Trajectory:
    return Trajectory(
        episode_id=job.episode_id,
        task_name=job.task.name,
        task_type=job.task.task_type,
        draw=job.draw,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        budget_units=dict(job.task.budget_units),
        min_tokens=job.task.min_tokens,
        max_tokens=job.limits.max_tokens,
    )


def _fail(trajectory: Trajectory, failure: Failure, error: str) -> None:
    """Nobody's fault but ours: the tokens so far stay on record, the episode is not scored."""
    trajectory.outcome, trajectory.correctness = Outcome.INFRA_ERROR, None
    trajectory.failure, trajectory.error = failure, error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
