"""What LightEngine promises beyond the contract: weights, room, ends, cancelled callers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import (
    CapacityError,
    ContextLost,
    EngineError,
    InvalidStateError,
    NotSupportedError,
    WeightsError,
)
from engine.light.engine import LightEngine
from engine.runtime.types import (
    ContextPolicy,
    DrawKey,
    EvictSelector,
    Sampling,
    StepRequest,
    StepResult,
    WeightSet,
)
from engine.runtime.weights import make_weight_set
from tests.engine.tiny import ENGINE, MODEL, make_engine, make_weights

POLICY = ContextPolicy(draw=DrawKey(3))
PROMPT = list(range(1, 40))


def serve(
    check: Callable[[LightEngine], Awaitable[None]], engine: LightEngine | None = None
) -> None:
    engine = engine or make_engine()
    try:
        asyncio.run(asyncio.wait_for(check(engine), timeout=60))
    finally:
        engine.close()


def small(**changes: object) -> EngineConfig:
    return ENGINE.model_copy(update=changes)


# -- weights ---------------------------------------------------------------------------------------


def test_no_step_before_weights():
    """A restarted engine never serves random weights; contexts may wait for them."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        assert (await engine.info()).weight_version == -1
        with pytest.raises(WeightsError, match="no weights yet"):
            await engine.forward_step(StepRequest(ctx, 1))
        assert await engine.load_weights(make_weights(4)) == 4
        assert (await engine.forward_step(StepRequest(ctx, 1))).weight_version == 4

    serve(check, LightEngine(MODEL, ENGINE))


def broken(kind: str) -> WeightSet:
    good = make_weights(9)
    tensors = {name: np.array(tensor) for name, tensor in good.tensors.items()}
    config = dict(good.manifest.model_config)
    if kind == "bit":
        tensors["norm.weight"].view(np.uint8)[0] ^= 1
        return WeightSet(good.manifest, tensors)
    if kind == "missing":
        del tensors["norm.weight"]
        return WeightSet(good.manifest, tensors)
    if kind == "checksum":
        return WeightSet(dataclasses.replace(good.manifest, checksum="0" * 64), tensors)
    if kind == "shape":
        tensors["norm.weight"] = tensors["norm.weight"][:-1]
    if kind == "dtype":
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float64)
    if kind == "unknown":
        tensors["extra"] = np.zeros(3, np.float32)
    if kind == "nan":
        tensors["norm.weight"][3] = np.nan
    if kind == "config":
        config["rope_theta"] = 12345.0
    return make_weight_set(9, tensors, config)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bit", "norm.weight does not match its sha256"),
        ("missing", "missing .'norm.weight'"),
        ("checksum", "manifest checksum 000000000000"),
        ("shape", "norm.weight is float32 .47,.*expects float32 .48,"),
        ("dtype", "norm.weight is float64"),
        ("unknown", "unknown .'extra'"),
        ("nan", "norm.weight holds NaN"),
        ("config", "rope_theta=12345.0, this engine has 10000.0"),
    ],
)
def test_bad_weights_change_nothing(kind: str, words: str):
    """WeightsError says what is wrong; the old version goes on to the same bits."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        other = await engine.fork(ctx)
        before = await engine.forward_step(StepRequest(ctx, 3))
        with pytest.raises(WeightsError, match=words):
            await engine.load_weights(broken(kind))
        after = await engine.forward_step(StepRequest(other, 3))
        np.testing.assert_array_equal(before.logprobs, after.logprobs)
        assert after.weight_version == 1

    serve(check)


def test_new_weights_recompute_live_contexts():
    """A context that lived through a swap = a fresh one under the new weights."""

    async def check(engine: LightEngine) -> None:
        old = await engine.init_context(PROMPT, POLICY)
        first = await engine.forward_step(StepRequest(old, 4))
        await engine.load_weights(make_weights(2, seed=5))
        second = await engine.forward_step(StepRequest(old, 4))
        fresh = await engine.init_context(PROMPT + first.token_ids.tolist(), POLICY)
        expected = await engine.forward_step(StepRequest(fresh, 4))
        assert (first.weight_version, second.weight_version) == (1, 2)
        np.testing.assert_array_equal(second.logprobs, expected.logprobs)

    serve(check)


def test_a_swap_waits_for_running_steps_and_holds_back_later_ones():
    """Every StepResult has one version, also when swaps are asked for in the middle."""

    async def check(engine: LightEngine) -> None:
        contexts = [await engine.init_context(PROMPT, POLICY) for _ in range(4)]

        def step(i: int) -> asyncio.Task[StepResult]:
            return asyncio.create_task(engine.forward_step(StepRequest(contexts[i], 20)))

        running = [step(0), step(1)]
        await asyncio.sleep(0)
        swap = asyncio.create_task(engine.load_weights(make_weights(2, seed=5)))
        await asyncio.sleep(0)
        held = step(2)
        await asyncio.sleep(0)
        again = asyncio.create_task(engine.load_weights(make_weights(3, seed=6)))
        await asyncio.sleep(0)
        last = step(3)
        assert [(await task).weight_version for task in running] == [1, 1]
        assert (await swap, (await held).weight_version) == (2, 2)
        assert (await again, (await last).weight_version) == (3, 3)

    serve(check)


def test_weights_that_compute_nan_fail_the_step_alone():
    """The step ends with a typed error; good weights bring the context back, blocks are clean."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        good = make_weights(3)
        tensors = {name: np.array(tensor) for name, tensor in good.tensors.items()}
        tensors["layers.0.self_attn.k_proj"][:] = 3e38
        await engine.load_weights(make_weight_set(2, tensors, {}))
        with pytest.raises(EngineError, match="weight version 2 computed NaN"):
            await engine.forward_step(StepRequest(ctx, 3))
        await engine.load_weights(good)
        fresh = await engine.init_context(PROMPT, POLICY)
        expected = await engine.forward_step(StepRequest(fresh, 3))
        result = await engine.forward_step(StepRequest(ctx, 3))
        np.testing.assert_array_equal(result.logprobs, expected.logprobs)
        assert np.isfinite(result.logprobs).all()

    serve(check)


# -- room ------------------------------------------------------------------------------------------


def test_a_context_larger_than_the_pool_is_refused_with_numbers():
    """The failed step leaves the context as it was."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        with pytest.raises(CapacityError, match=r"blocks wanted, \d of 2 free"):
            await engine.forward_step(StepRequest(ctx, 60))
        assert (await engine.get_kv_summary(ctx)).num_tokens == len(PROMPT)
        assert (await engine.forward_step(StepRequest(ctx, 20))).start == len(PROMPT)

    serve(check, make_engine(small(num_blocks=2)))


def test_idle_contexts_give_room():
    """Twelve episodes in a pool for three; nobody is refused, nobody's tokens change."""

    async def check(engine: LightEngine) -> None:
        contexts = [
            await engine.init_context(PROMPT, ContextPolicy(draw=DrawKey(3, sample=i % 3)))
            for i in range(12)
        ]
        first = [await engine.forward_step(StepRequest(ctx, 5)) for ctx in contexts]
        second = await asyncio.gather(
            *(engine.forward_step(StepRequest(ctx, 5)) for ctx in contexts)
        )
        for results in (first, second):
            for i, result in enumerate(results):
                np.testing.assert_array_equal(result.logprobs, results[i % 3].logprobs)

    serve(check, make_engine(small(num_blocks=7)))


def test_too_many_contexts_are_refused_with_numbers():
    """Slots come back with release."""

    async def check(engine: LightEngine) -> None:
        contexts = [await engine.init_context(PROMPT, POLICY) for _ in range(2)]
        with pytest.raises(CapacityError, match="2 contexts are open"):
            await engine.init_context(PROMPT, POLICY)
        with pytest.raises(CapacityError, match="2 contexts are open"):
            await engine.fork(contexts[0])
        await engine.release(contexts[0])
        await engine.fork(contexts[1])

    serve(check, make_engine(small(max_contexts=2)))


def test_a_fork_shares_full_blocks():
    """70 tokens: two full blocks are shared, the third is copied."""

    async def check(engine: LightEngine) -> None:
        parent = await engine.init_context([1] * 70, POLICY)
        child = await engine.fork(parent)
        block = (await engine.get_kv_summary(parent)).kv_bytes // 3
        assert (await engine.info()).kv_bytes_used == 4 * block
        await engine.release(parent)
        assert (await engine.info()).kv_bytes_used == 3 * block
        assert (await engine.get_kv_summary(child)).num_hot == 69

    serve(check)


def test_only_new_tokens_are_computed():
    """Between turns the KV stays: what is missing is what was appended, and the last token."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        await engine.forward_step(StepRequest(ctx, 5))
        await engine.append(ctx, [1, 2, 3])
        await engine.evict_kv(ctx, EvictSelector(0, 0))
        summary = await engine.get_kv_summary(ctx)
        assert (summary.num_tokens, summary.num_hot) == (47, 43)
        evicted = await engine.evict_kv(ctx, EvictSelector(33, 34))
        assert evicted.evicted == ((32, 47),)
        assert (await engine.get_kv_summary(ctx)).num_hot == 32

    serve(check)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [ContextPolicy(kv="tiered"), ContextPolicy(summaries=True), ContextPolicy(deterministic=True)],
)
def test_policies_it_cannot_keep_are_refused(policy: ContextPolicy):
    """Instead of serving something else in silence."""

    async def check(engine: LightEngine) -> None:
        with pytest.raises(NotSupportedError):
            await engine.init_context(PROMPT, policy)
        assert "deterministic" not in (await engine.info()).capabilities

    serve(check, make_engine(small(deterministic=False)))


def test_media_are_refused():
    """Text only."""

    async def check(engine: LightEngine) -> None:
        with pytest.raises(NotSupportedError, match="1 media items"):
            await engine.init_context(PROMPT, POLICY, media=[b"image"])

    serve(check)


def test_sampling_without_a_draw_key_is_seeded_by_the_engine():
    """Two contexts differ; two engines with one seed agree."""

    async def sampled(engine: LightEngine) -> list[list[int]]:
        results = []
        for _ in range(2):
            ctx = await engine.init_context(PROMPT, ContextPolicy())
            step = StepRequest(ctx, 8, Sampling(temperature=2.0))
            results.append((await engine.forward_step(step)).token_ids.tolist())
        return results

    runs = []
    for seed in (0, 0, 1):
        engine = make_engine(small(seed=seed))
        runs.append(asyncio.run(sampled(engine)))
        engine.close()
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


# -- ends ------------------------------------------------------------------------------------------


def test_close_wakes_everyone():
    """Running steps and waiting swaps get ContextLost; later calls too."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        step = asyncio.create_task(engine.forward_step(StepRequest(ctx, 10_000)))
        await asyncio.sleep(0)
        swap = asyncio.create_task(engine.load_weights(make_weights(2)))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        for task in (step, swap):
            with contextlib.suppress(ContextLost):
                await task  # a step may have filled its context just before
        with pytest.raises(ContextLost, match="closed"):
            await engine.init_context(PROMPT, POLICY)

    serve(check)


def test_a_bug_in_the_engine_leaves_nobody_waiting():
    """The thread ends, every open call gets ContextLost, and the owner is told."""
    told: list[Exception] = []
    engine = LightEngine(
        MODEL, ENGINE, fetch_weights=lambda version: make_weights(), on_failure=told.append
    )

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        engine._scheduler.contexts.tables = np.zeros((0, 0), np.int64)  # as memory gone wrong
        with pytest.raises(ContextLost, match="failed with IndexError"):
            await engine.forward_step(StepRequest(ctx, 1))
        with pytest.raises(ContextLost, match="failed with IndexError"):
            await engine.info()
        assert engine.closed

    serve(check, engine)
    assert [type(error) for error in told] == [IndexError]


def test_a_cancelled_caller_leaves_nothing_running():
    """Its step ends, its half-made contexts are released."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context([1], POLICY)
        calls = [
            engine.forward_step(StepRequest(ctx, 10_000)),
            engine.init_context(PROMPT, POLICY),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await engine.info()).num_contexts == 1
        await engine.evict_kv(ctx, EvictSelector(0, 0))
        assert (await engine.get_kv_summary(ctx)).num_tokens < ENGINE.max_context

    serve(check)


def test_a_cancelled_fork_makes_no_child():
    """Also while it waits for its parent's prompt."""

    async def check(engine: LightEngine) -> None:
        parent = await engine.init_context([1] * 150, POLICY)
        fork = asyncio.ensure_future(engine.fork(parent))
        await asyncio.sleep(0)
        fork.cancel()
        await asyncio.gather(fork, return_exceptions=True)
        assert (await engine.info()).num_contexts == 1
        await engine.forward_step(StepRequest(parent, 1))

    serve(check)


def test_nothing_may_slip_between_a_fork_and_its_prompt():
    """append while a fork waits would give the child another prompt."""

    async def check(engine: LightEngine) -> None:
        parent = await engine.init_context([1] * 150, POLICY)
        fork = asyncio.ensure_future(engine.fork(parent))
        await asyncio.sleep(0)
        with contextlib.suppress(InvalidStateError):  # raised unless the fork was quicker
            await engine.append(parent, [2])
        assert (await engine.get_kv_summary(await fork)).num_tokens == 150

    serve(check, make_engine(small(max_rows=32)))


def test_release_ends_a_running_step():
    """The step's caller gets what was sampled, the context is gone."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context([1], POLICY)
        step = asyncio.ensure_future(engine.forward_step(StepRequest(ctx, 10_000)))
        await asyncio.sleep(0)
        await engine.release(ctx)
        assert (await step).finish in ("cancelled", "length")
        assert (await engine.info()).num_contexts == 0

    serve(check)


def test_callers_on_many_loops():
    """Four threads with an event loop each share one engine and its batches."""
    engine = make_engine()
    results: dict[int, list[int]] = {}

    async def episode(sample: int) -> None:
        policy = ContextPolicy(draw=DrawKey(3, sample=sample % 2))
        ctx = await engine.init_context(PROMPT, policy)
        results[sample] = (await engine.forward_step(StepRequest(ctx, 10))).token_ids.tolist()

    threads = [threading.Thread(target=lambda i=i: asyncio.run(episode(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    engine.close()
    assert results[0] == results[2] != results[1] == results[3]
