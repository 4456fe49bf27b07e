"""deterministic=True: a row's bits depend on its context alone (house 4.9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.runtime.types import ContextPolicy, DrawKey, EvictSelector, StepRequest, StepResult
from tests.engine.tiny import ENGINE, make_engine

NUM_NEIGHBOURS = 31
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 83, 45)]
OBSERVED = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@dataclass(frozen=True, slots=True)
class Trace:
    """What must be equal bit for bit."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray

    @classmethod
    def of(cls, results: Sequence[StepResult]) -> Trace:
        experts = [result.experts for result in results if result.experts is not None]
        return cls(
            np.concatenate([result.token_ids for result in results]),
            np.concatenate([result.logprobs for result in results]),
            np.concatenate(experts),
        )

    def check(self, other: Trace) -> None:
        np.testing.assert_array_equal(self.token_ids, other.token_ids)
        np.testing.assert_array_equal(self.logprobs, other.logprobs)
        np.testing.assert_array_equal(self.experts, other.experts)


def policy(sample: int) -> ContextPolicy:
    return ContextPolicy(deterministic=True, draw=DrawKey(11, sample=sample))


async def episode(engine: LightEngine, prompt: list[int], sample: int) -> Trace:
    """Two turns with an observation between."""
    ctx = await engine.init_context(prompt, policy(sample))
    first = await engine.forward_step(StepRequest(ctx, 12))
    await engine.append(ctx, OBSERVED)
    second = await engine.forward_step(StepRequest(ctx, 12))
    await engine.release(ctx)
    return Trace.of([first, second])


def run_alone(config: EngineConfig = ENGINE) -> Trace:
    engine = make_engine(config)
    try:
        return asyncio.run(episode(engine, PROMPT, 5))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone() -> Trace:
    return run_alone()


@pytest.mark.parametrize("place", [0, 17, NUM_NEIGHBOURS])
def test_alone_is_in_a_batch(alone: Trace, place: int):
    """31 neighbours with other prompts, lengths and draws, before and after it."""

    async def crowd(engine: LightEngine) -> Trace:
        rng = np.random.default_rng(place)
        prompts = [rng.integers(0, 83, rng.integers(1, 90)).tolist() for _ in range(NUM_NEIGHBOURS)]
        prompts.insert(place, PROMPT)
        calls = [
            episode(engine, prompt, 5 if i == place else 100 + i)
            for i, prompt in enumerate(prompts)
        ]
        return (await asyncio.gather(*calls))[place]

    engine = make_engine()
    try:
        asyncio.run(crowd(engine)).check(alone)
    finally:
        engine.close()


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_prefill_in_chunks(alone: Trace, chunk: int):
    """However the prompt arrives, computed piece by piece, nothing changes."""

    async def chunked(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT[:1], policy(5))
        for start in range(1, len(PROMPT), chunk):
            await engine.append(ctx, PROMPT[start : start + chunk])
            # a fork computes all of the parent's tokens but the last
            await engine.release(await engine.fork(ctx))
        results = [await engine.forward_step(StepRequest(ctx, 12))]
        await engine.append(ctx, OBSERVED)
        results.append(await engine.forward_step(StepRequest(ctx, 12)))
        return Trace.of(results)

    engine = make_engine()
    try:
        asyncio.run(chunked(engine)).check(alone)
    finally:
        engine.close()


def test_rows_a_batch(alone: Trace):
    """A batch of 32 rows splits the prompt, a batch of 96 does not."""
    run_alone(ENGINE.model_copy(update={"max_rows": 32})).check(alone)


def test_one_token_a_step(alone: Trace):
    """24 steps of one token, each of its own batch."""

    async def single(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT, policy(5))
        results = [await engine.forward_step(StepRequest(ctx, 1)) for _ in range(12)]
        await engine.append(ctx, OBSERVED)
        results += [await engine.forward_step(StepRequest(ctx, 1)) for _ in range(12)]
        return Trace.of(results)

    engine = make_engine()
    try:
        asyncio.run(single(engine)).check(alone)
    finally:
        engine.close()


def test_fork(alone: Trace):
    """A child that shares its parent's KV, twice removed."""

    async def forked(engine: LightEngine) -> Trace:
        parent = await engine.init_context(PROMPT, policy(0))
        middle = await engine.fork(parent, policy(1))
        await engine.forward_step(StepRequest(parent, 30))
        ctx = await engine.fork(middle, policy(5))
        results = [await engine.forward_step(StepRequest(ctx, 12))]
        await engine.append(ctx, OBSERVED)
        results.append(await engine.forward_step(StepRequest(ctx, 12)))
        return Trace.of(results)

    engine = make_engine()
    try:
        asyncio.run(forked(engine)).check(alone)
    finally:
        engine.close()


def test_rebuilt_by_teacher_forcing(alone: Trace):
    """A new engine given the tokens of the first turn goes on as the lost one would have."""

    async def rebuilt(engine: LightEngine) -> StepResult:
        tokens = PROMPT + alone.token_ids[:12].tolist() + OBSERVED
        ctx = await engine.init_context(tokens, policy(5))
        return await engine.forward_step(StepRequest(ctx, 12))

    engine = make_engine()
    try:
        result = asyncio.run(rebuilt(engine))
    finally:
        engine.close()
    np.testing.assert_array_equal(result.token_ids, alone.token_ids[12:])
    np.testing.assert_array_equal(result.logprobs, alone.logprobs[12:])
    assert result.experts is not None
    np.testing.assert_array_equal(result.experts, alone.experts)


def test_evicted_and_preempted(alone: Trace):
    """Blocks that were dropped, by request or for lack of room, are recomputed to the same bits."""

    async def squeezed(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT, policy(5))
        others = [await engine.init_context(PROMPT[i:], policy(50 + i)) for i in range(6)]
        crowd = [
            asyncio.ensure_future(engine.forward_step(StepRequest(other, 60))) for other in others
        ]
        results = [await engine.forward_step(StepRequest(ctx, 12))]
        await engine.append(ctx, OBSERVED)
        await engine.evict_kv(ctx, EvictSelector(4, 9))
        results.append(await engine.forward_step(StepRequest(ctx, 12)))
        await asyncio.gather(*crowd)
        return Trace.of(results)

    # 7 contexts of up to 105 tokens want 28 blocks
    engine = make_engine(ENGINE.model_copy(update={"num_blocks": 10}))
    try:
        asyncio.run(squeezed(engine)).check(alone)
    finally:
        engine.close()
