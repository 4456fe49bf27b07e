"""Cold blocks in LightEngine: sent away and fetched by name, by a turn's question, or for room.

The policy is the hand-built one of engine.bench.kv_recall: it states a fact exactly when the fact's
block can be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.bench.kv_recall import Fact, library, model_config, recall_weights, small_attention
from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.errors import CapacityError, NotSupportedError
from engine.kvcache.config import ColdRouterConfig, HotZoneConfig, TierConfig
from engine.light.engine import LightEngine
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    EvictSelector,
    KVSummary,
    Sampling,
    StepRequest,
    StepResult,
)
from infra.errors import ConfigError

# the smallest in which a fact is cold, and another warm
TEXT = library(700, [100, 200, 330])
MODEL = model_config(len(TEXT.names), 1024, **small_attention())
KEEP_ALL = EngineConfig(max_context=1000, num_blocks=128, num_warm_blocks=128, max_rows=128)
COLD = KEEP_ALL.model_copy(update={"tiers": TierConfig(warm=128)})
ROUTED = COLD.model_copy(
    update={"cold_router": ColdRouterConfig(encoder="hashing", budget=4, question_tokens=8)}
)
LOOSE = {"deterministic": False}
GREEDY = Sampling(temperature=0)


@cache
def weights() -> Any:
    return recall_weights(MODEL)


def run(check: Callable[[LightEngine], Awaitable[Any]], config: EngineConfig = KEEP_ALL) -> Any:
    text_of = TEXT.text if config.cold_router is not None else None
    engine = LightEngine(MODEL, config, fetch_weights=lambda _: weights(), text_of=text_of)
    try:
        return asyncio.run(asyncio.wait_for(check(engine), timeout=120))
    finally:
        engine.close()


async def opened(engine: LightEngine, num: int = 700, **policy: Any) -> ContextId:
    """The context with its KV computed."""
    ctx = await engine.init_context(TEXT.token_ids[:num], ContextPolicy(**policy))
    await engine.release(await engine.fork(ctx))
    return ctx


async def ask(engine: LightEngine, ctx: ContextId, fact: Fact) -> StepResult:
    """On a fork."""
    child = await engine.fork(ctx)
    await engine.append(child, [fact.key])
    result = await engine.forward_step(StepRequest(child, 9, GREEDY, (TEXT.end,)))
    await engine.release(child)
    return result


async def account(engine: LightEngine, ctx: ContextId) -> KVSummary:
    """Also after a step, which an empty eviction closes."""
    await engine.evict_kv(ctx, EvictSelector(0, 0))
    return await engine.get_kv_summary(ctx)


def is_right(result: StepResult, fact: Fact) -> bool:
    return tuple(result.token_ids.tolist()) == fact.answer


# -- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cold", ["disk", pytest.param("host", marks=pytest.mark.slow)])
def test_blocks_are_sent_to_cold_and_come_back(cold: str, tmp_path: Any):
    """Device bytes are given back as told, the fact cannot be stated, and then to the same bits."""
    # host memory for three of the six blocks, the others go to the file
    host = 60_000 if cold == "disk" else 1 << 20
    tiers = TierConfig.model_validate({"cold": cold, "directory": tmp_path, "host_bytes": host})
    fact = TEXT.facts[0]

    async def check(engine: LightEngine) -> None:
        ctx = await opened(engine)
        first = await ask(engine, ctx, fact)
        before = await account(engine, ctx)
        gone = await engine.evict_kv(ctx, EvictSelector(0, 200, to="cold"))
        after = await account(engine, ctx)
        assert gone.confirmed and gone.evicted == tuple((b, b + 32) for b in range(32, 224, 32))
        assert gone.freed_bytes == before.kv_bytes - after.kv_bytes > 0
        assert (before.num_cold, after.num_cold) == (0, 192)
        assert after.num_warm == before.num_warm - 192 and after.num_hot == before.num_hot
        assert after.cold_bytes > 0 and after.vectors is None
        cold_answer = await ask(engine, ctx, fact)
        back = await engine.rewarm_kv(ctx, EvictSelector(0, 200))
        assert back.loaded == gone.evicted
        second = await ask(engine, ctx, fact)
        assert is_right(first, fact) and is_right(second, fact)
        assert not is_right(cold_answer, fact)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)

    run(check, KEEP_ALL.model_copy(update={"tiers": tiers}))


def test_full_precision_stays_where_it_is():
    """The sink, the hot zone, and an engine without a cold tier."""

    async def check(engine: LightEngine) -> None:
        ctx = await opened(engine)
        for start, end in ((0, 32), (660, 700), (50, 50)):
            gone = await engine.evict_kv(ctx, EvictSelector(start, end, to="cold"))
            assert gone.evicted == () and gone.freed_bytes == 0

    async def refused(engine: LightEngine) -> None:
        with pytest.raises(NotSupportedError, match="cold = 'off'"):
            await engine.evict_kv(await opened(engine, 40), EvictSelector(0, 1, to="cold"))

    run(check)
    run(refused, KEEP_ALL.model_copy(update={"tiers": TierConfig(cold="off")}))


def test_moves_are_made_again_when_the_kv_is_computed_again():
    """Blocks were sent away and fetched at certain lengths: after a loss the same ones are read."""
    fact = TEXT.facts[1]

    async def check(engine: LightEngine, lose: bool) -> list[StepResult]:
        ctx = await opened(engine, 500)
        await engine.evict_kv(ctx, EvictSelector(64, 250, to="cold"))
        found = [await ask(engine, ctx, fact)]
        await engine.append(ctx, TEXT.token_ids[500:700])
        await engine.release(await engine.fork(ctx))
        await engine.rewarm_kv(ctx, EvictSelector(200, 210))
        if lose:
            await engine.evict_kv(ctx, EvictSelector(0, 1))
        found.append(await ask(engine, ctx, fact))
        return found

    kept, lost = run(lambda e: check(e, False)), run(lambda e: check(e, True))
    assert not is_right(kept[0], fact) and is_right(kept[1], fact)
    for one, other in zip(kept, lost, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


# -- by a turn's question --------------------------------------------------------------------------


def test_a_question_brings_its_block_back():
    """With the router the fact is stated, without it is not; other blocks stay cold."""
    fact = TEXT.facts[0]

    async def check(engine: LightEngine) -> tuple[StepResult, int]:
        ctx = await opened(engine)
        before = (await account(engine, ctx)).num_cold
        await engine.append(ctx, [fact.key])
        result = await engine.forward_step(StepRequest(ctx, 9, GREEDY, (TEXT.end,)))
        return result, before - (await account(engine, ctx)).num_cold

    (without, none), (found, fetched) = run(check, COLD), run(check, ROUTED)
    assert is_right(found, fact) and not is_right(without, fact)
    # one block more grew old meanwhile
    assert none <= 0 < fetched <= 4 * 32


@pytest.fixture(scope="module")
def alone() -> list[StepResult]:
    return run(two_turns, ROUTED)


async def two_turns(engine: LightEngine) -> list[StepResult]:
    """The prompt's end is a question too."""
    draw = DrawKey(3, sample=1)
    first, second = TEXT.facts[:2]
    prompt = [*TEXT.token_ids[:600], first.key]
    policy = ContextPolicy(deterministic=True, draw=draw)
    ctx = await engine.init_context(prompt, policy)
    results = [await engine.forward_step(StepRequest(ctx, 9, GREEDY, (TEXT.end,)))]
    await engine.append(ctx, [*TEXT.token_ids[600:690], second.key])
    results.append(await engine.forward_step(StepRequest(ctx, 9, GREEDY, (TEXT.end,))))
    return results


def test_turns_are_routed_in_prompt_and_observation(alone: list[StepResult]):
    assert [is_right(r, f) for r, f in zip(alone, TEXT.facts, strict=False)] == [True, True]


def test_routing_keeps_bits(alone: list[StepResult]):
    """Beside other contexts, in small batches, with the KV lost between the turns, and from the
    tokens alone in another engine."""

    async def lost(engine: LightEngine) -> list[StepResult]:
        crowd = [asyncio.ensure_future(two_turns(engine)) for _ in range(2)]
        first = TEXT.facts[0]
        draw = ContextPolicy(deterministic=True, draw=DrawKey(3, sample=1))
        ctx = await engine.init_context([*TEXT.token_ids[:600], first.key], draw)
        results = [await engine.forward_step(StepRequest(ctx, 9, GREEDY, (TEXT.end,)))]
        await engine.evict_kv(ctx, EvictSelector(0, 1))
        await engine.append(ctx, [*TEXT.token_ids[600:690], TEXT.facts[1].key])
        results.append(await engine.forward_step(StepRequest(ctx, 9, GREEDY, (TEXT.end,))))
        await asyncio.gather(*crowd)
        return results

    found = run(lost, ROUTED.model_copy(update={"max_rows": 32}))
    for one, other in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_a_turn_need_not_wait(policy: str):
    """What has not arrived when the turn begins is there for the next one."""
    fact = TEXT.facts[0]
    router = ColdRouterConfig.model_validate(
        {"encoder": "none", "policy": policy, "timeout_s": 0.0, "budget": 4}
    )

    async def check(engine: LightEngine) -> None:
        ctx = await opened(engine)
        await engine.append(ctx, [fact.key])
        await engine.forward_step(StepRequest(ctx, 1, GREEDY))
        assert is_right(await ask(engine, ctx, fact), fact)

    run(check, ROUTED.model_copy(update={"cold_router": router, **LOOSE}))


def test_summaries_of_cold_blocks():
    """A vector a block, where the policy asks for them."""

    async def check(engine: LightEngine) -> None:
        ctx = await opened(engine, summaries=True)
        summary = await account(engine, ctx)
        assert summary.vectors is not None
        assert summary.vectors.shape == (summary.num_cold // 32, 512)
        np.testing.assert_allclose(np.linalg.norm(summary.vectors, axis=1), 1, atol=1e-4)

    async def refused(engine: LightEngine) -> None:
        with pytest.raises(NotSupportedError, match="without summaries"):
            await engine.init_context([1], ContextPolicy(summaries=True))

    run(check, ROUTED)
    run(refused, COLD)


# -- for room --------------------------------------------------------------------------------------


def test_the_oldest_warm_blocks_leave_before_anything_is_refused():
    """A warm pool of 8 blocks and contexts of 20: the engine goes on, and what left comes back.
    In deterministic mode the same context is refused, with numbers."""
    small = KEEP_ALL.model_copy(update={"num_warm_blocks": 8})
    first, last = TEXT.facts[0], TEXT.facts[2]

    async def check(engine: LightEngine) -> None:
        ctx = await opened(engine)
        other = await opened(engine, 420)
        mine, theirs = await account(engine, ctx), await account(engine, other)
        assert mine.num_cold >= 10 * 32 and mine.num_warm + theirs.num_warm <= 8 * 32
        assert mine.num_tokens == 700 and mine.num_hot + mine.num_warm + mine.num_cold == 699
        # the other's newest warm block stayed
        assert is_right(await ask(engine, other, last), last)
        assert not is_right(await ask(engine, ctx, first), first)
        await engine.rewarm_kv(ctx, EvictSelector(96, 128))
        assert is_right(await ask(engine, ctx, first), first)

    async def refused(engine: LightEngine) -> None:
        with pytest.raises(CapacityError, match="warm KV blocks wanted"):
            await opened(engine)

    run(check, small.model_copy(update=LOOSE))
    run(refused, small)


# -- the hot zone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["absolute", pytest.param("quantile", marks=pytest.mark.slow)])
def test_the_hot_zone_follows_attention(mode: str):
    """Thresholds that always ask for more: the zone grows to its maximum, step by step, and the
    policy says the same."""
    zone = HotZoneConfig.model_validate(
        {
            "mode": mode,
            "step": 32,
            "maximum": 128,
            "patience": 1,
            "mean_over": 1,
            "low": 0.98,
            "high": 0.99,
            "calibration": 16,
            "edge_share": 1e-9,
            "low_quantile": 0.98,
            "high_quantile": 0.99,
        }
    )
    fact = TEXT.facts[0]

    async def check(engine: LightEngine) -> list[int]:
        ctx = await opened(engine)
        hot: list[int] = []
        for _ in range(3):
            result = await engine.forward_step(StepRequest(ctx, 32, GREEDY))
            hot.append((await account(engine, ctx)).num_hot)
            assert len(result.token_ids) == 32
        assert is_right(await ask(engine, ctx, fact), fact)
        return hot

    fixed = run(check, KEEP_ALL.model_copy(update=LOOSE))
    grown = run(check, KEEP_ALL.model_copy(update={"hot_zone": zone, **LOOSE}))
    assert max(fixed) <= 32 + 64 + 32
    assert grown[-1] > fixed[-1] + 32 if mode == "absolute" else grown[-1] >= fixed[-1]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hot_zone": HotZoneConfig()}, r"hot_zone.mode='quantile' with engine.deterministic=true"),
        (
            {"cold_router": ColdRouterConfig(policy="best_effort")},
            r"cold_router.policy='best_effort' with engine.deterministic=true",
        ),
        (
            {"cold_router": ColdRouterConfig(), "tiers": TierConfig(cold="off")},
            r"tiers.cold='off' sends nothing away",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words) as refused:
        run(opened, KEEP_ALL.model_copy(update=changes))
    assert "\n" not in str(refused.value)


def test_a_router_needs_a_text():
    """A callable or a vocabulary."""
    with pytest.raises(ConfigError, match="without text_of"):
        LightEngine(MODEL, ROUTED)
    words = Vocabulary(tuple(f"{name} ".encode() for name in TEXT.names), (TEXT.end,))
    assert words.text(TEXT.facts[0].answer) == "343 706 657 END "
    LightEngine(MODEL, ROUTED, vocabulary=words).close()
