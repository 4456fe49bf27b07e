"""What trouble of one context must not do to another: shared blocks, short pools, bad numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import CapacityError, EngineError
from engine.light.engine import LightEngine
from engine.model.model import Attention, PolicyModel
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest, WeightSet
from engine.runtime.weights import make_weight_set
from tests.engine.tiny import ENGINE, MODEL, make_model, make_weights

PROMPT = [int(token) for token in np.random.default_rng(4).integers(0, 60, 70)]
BAD_TOKEN = 77


def policy(sample: int) -> ContextPolicy:
    return ContextPolicy(draw=DrawKey(2, sample=sample))


def weights_of(model: PolicyModel, version: int = 1) -> WeightSet:
    tensors = {name: t.numpy() for name, t in model.state_dict().items()}
    return make_weight_set(version, tensors, MODEL.model_dump(mode="json"))


def run(
    check: Callable[[LightEngine], Coroutine[Any, Any, None]],
    weights: WeightSet | None = None,
    **changes: Any,
) -> None:
    config: EngineConfig = ENGINE.model_copy(update=changes)
    used = weights or make_weights()
    engine = LightEngine(MODEL, config, fetch_weights=lambda version: used)
    try:
        asyncio.run(check(engine))
    finally:
        engine.close()


async def sampled(engine: LightEngine, tokens: list[int], sample: int, count: int) -> list[int]:
    ctx = await engine.init_context(tokens, policy(sample))
    result = await engine.forward_step(StepRequest(ctx, count))
    await engine.release(ctx)
    return result.token_ids.tolist()


def test_blocks_of_a_failed_step_are_not_shared():
    """A step that ran out of blocks leaves none past the last token, so that a fork does not write
    where its parent does."""

    async def check(engine: LightEngine) -> None:
        expected = [await sampled(engine, PROMPT[:20], sample, 40) for sample in (1, 2)]
        parent = await engine.init_context(PROMPT[:20], policy(1))
        with pytest.raises(CapacityError, match="KV blocks wanted"):
            await engine.forward_step(StepRequest(parent, 150))
        assert (await engine.get_kv_summary(parent)).num_tokens == 20
        child = await engine.fork(parent, policy(2))
        held = [(await engine.get_kv_summary(ctx)).kv_bytes for ctx in (parent, child)]
        block = engine._scheduler.contexts._kv.bytes_per_block
        assert held == [block, block]
        steps = (engine.forward_step(StepRequest(ctx, 40)) for ctx in (parent, child))
        results = await asyncio.gather(*steps)
        assert [result.token_ids.tolist() for result in results] == expected

    run(check, num_blocks=4)


def test_steps_behind_a_swap_give_room():
    """A running step is not refused for want of blocks that only a step held back by a weight swap
    keeps; that one recomputes them."""

    async def check(engine: LightEngine) -> None:
        holder = await engine.init_context(PROMPT, policy(3))
        await engine.forward_step(StepRequest(holder, 1))
        runner = await engine.init_context(PROMPT[:10], policy(4))
        # all of it before the runner needs a block of its own
        running = asyncio.ensure_future(engine.forward_step(StepRequest(runner, 100)))
        loading = asyncio.ensure_future(engine.load_weights(make_weights(2)))
        held = asyncio.ensure_future(engine.forward_step(StepRequest(holder, 5)))
        first, version, second = await asyncio.gather(running, loading, held)
        assert (len(first.token_ids), first.weight_version) == (100, 1)
        assert (version, second.weight_version, len(second.token_ids)) == (2, 2, 5)

    # 110 tokens want four blocks, the holder keeps three
    run(check, num_blocks=4)


def poisoned_by_one_token() -> WeightSet:
    """Finite weights under which BAD_TOKEN alone overflows: only it uses feature 0."""
    model = make_model()
    model.embed_tokens.data[:, 0] = 0.0
    model.embed_tokens.data[BAD_TOKEN, 0] = 1e3
    attention = model.layers[0].self_attn
    assert isinstance(attention, Attention)
    attention.v_proj.data[:, 0] = 3e38
    return weights_of(model)


def test_a_poisoned_context_leaves_its_fork_alone():
    """Parent and child share blocks; the parent's overflow must not clear what the child reads."""

    async def check(engine: LightEngine) -> None:
        expected = await sampled(engine, PROMPT, 6, 20)
        parent = await engine.init_context(PROMPT, policy(5))
        child = await engine.fork(parent, policy(6))
        first = await engine.forward_step(StepRequest(child, 3))
        await engine.append(parent, [BAD_TOKEN])
        with pytest.raises(EngineError, match="NaN or infinity"):
            await engine.forward_step(StepRequest(parent, 2))
        rest = await engine.forward_step(StepRequest(child, 17))
        assert first.token_ids.tolist() + rest.token_ids.tolist() == expected
        # and its blocks are clean for whoever gets them next
        await engine.release(child)
        await engine.release(parent)
        crowd = [sampled(engine, PROMPT[:40], 6, 5) for _ in range(4)]
        results = await asyncio.gather(*crowd)
        assert all(result == results[0] for result in results)

    run(check, poisoned_by_one_token(), num_blocks=9)


def test_logits_that_overflow_are_an_error():
    """Finite hidden states, infinite logits: no NaN logprob leaves the engine."""
    model = make_model()
    assert model.lm_head is not None
    model.lm_head.data.fill_(3e38)

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, policy(1))
        with pytest.raises(EngineError, match="NaN or infinity"):
            await engine.forward_step(StepRequest(ctx, 2))
        await engine.load_weights(make_weights(2))
        result = await engine.forward_step(StepRequest(ctx, 2))
        assert np.isfinite(result.logprobs).all()

    run(check, weights_of(model))
