"""Alarms on a real engine: what fills its pools raises them, what they do is really done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import Overloaded
from engine.kvcache.config import ColdRouterConfig, TierConfig
from engine.light.alarms import AlarmConfig, Level
from engine.light.engine import LightEngine
from engine.light.relief import AlarmWatch
from engine.light.routed import RoutedRuntime
from engine.light.waiting_room import RouterConfig
from engine.model.config import ModelConfig
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EvictSelector,
    Sampling,
    StepRequest,
)
from tests.engine.tiny import ENGINE, HYBRID, MODEL, make_weights

GREEDY = Sampling(temperature=0.0)
WIDE = ModelConfig.model_validate(
    HYBRID.model_dump() | {"attention": HYBRID.attention.model_dump() | {"hot": 64}}
)
FREE = ENGINE.model_copy(update={"deterministic": False, "num_blocks": 24, "num_warm_blocks": 24})


def watched(
    check: Callable[[RoutedRuntime, LightEngine, AlarmWatch], Awaitable[None]],
    config: EngineConfig,
    model: ModelConfig,
    **alarms: Any,
) -> None:
    weights = make_weights(config=model)
    engine = LightEngine(
        model,
        config,
        fetch_weights=lambda version: weights,
        text_of=lambda ids: " ".join(f"w{i}" for i in ids),
    )
    router = RoutedRuntime(engine, RouterConfig(), kv_bytes=lambda n: n, kv_bytes_total=10**9)
    watch = AlarmWatch(engine, AlarmConfig(**alarms), router.refuse)
    try:
        asyncio.run(asyncio.wait_for(check(router, engine, watch), timeout=200))
    finally:
        engine.close()


async def filled(runtime: RoutedRuntime, length: int, sample: int) -> ContextId:
    tokens = np.random.default_rng(sample).integers(0, 83, length).tolist()
    ctx = await runtime.init_context(tokens, ContextPolicy())
    await runtime.forward_step(StepRequest(ctx, 1, GREEDY))
    return ctx


def test_orange_shrinks_hot_zones_until_it_is_over() -> None:
    """Three contexts of 150 tokens hold 4 full-precision blocks each of 24; the limit is 10.8. What
    leaves the zone is coded at once, no step is needed; and they go on."""

    async def check(router: RoutedRuntime, engine: LightEngine, watch: AlarmWatch) -> None:
        contexts = [await filled(router, 150, n) for n in range(3)]
        before = await engine.on_table(lambda table: table.cache_state())
        assert 2 * before.hot == before.hot_total and before.warm_bf16 > 0
        assert await watch.look() is Level.ORANGE
        after = await engine.on_table(lambda table: table.cache_state())
        assert after.hot < before.hot and after.warm > before.warm
        assert await watch.look() is Level.NONE
        for ctx in contexts:
            result = await router.forward_step(StepRequest(ctx, 4, GREEDY))
            assert len(result.token_ids) == 4

    watched(check, FREE, WIDE, hot_share=0.45)


def test_a_deterministic_engine_keeps_its_zones() -> None:
    """Tiers are the learner's there."""

    async def check(router: RoutedRuntime, engine: LightEngine, watch: AlarmWatch) -> None:
        await filled(router, 144, 0)
        before = await engine.on_table(lambda table: table.cache_state())
        assert await watch.look() is Level.ORANGE
        assert await engine.on_table(lambda table: table.cache_state()) == before

    config = FREE.model_copy(update={"deterministic": True})
    watched(check, config, WIDE, hot_share=0.1)


def test_red_sends_codes_away_prepares_summaries_and_refuses() -> None:
    """Until contexts are released."""
    config = FREE.model_copy(
        update={
            "tiers": TierConfig(warm=4096),
            "cold_router": ColdRouterConfig(encoder="hashing"),
        }
    )

    async def check(router: RoutedRuntime, engine: LightEngine, watch: AlarmWatch) -> None:
        contexts = [await filled(router, 150, n) for n in range(3)]
        before = await engine.on_table(lambda table: table.cache_state())
        assert before.warm and not before.cold
        assert await watch.look() is Level.RED
        after = await engine.on_table(lambda table: table.cache_state())
        assert after.cold and after.warm < before.warm
        assert await engine.on_table(lambda table: table.prewarm_summaries(99)) == 0, "made already"
        with pytest.raises(Overloaded, match="taking no new contexts"):
            await router.init_context([1, 2], ContextPolicy())
        for ctx in contexts:
            await router.release(ctx)
        assert await watch.look() is Level.NONE
        assert watch.gauges()["alarm_level"] == 0
        await filled(router, 20, 9)

    watched(check, config, HYBRID, hot_share=1.0, total_share=0.2)


def test_red_takes_idle_contexts_where_there_is_no_cold_tier() -> None:
    """Full attention: they are computed again by their next step, to the same tokens."""

    async def check(router: RoutedRuntime, engine: LightEngine, watch: AlarmWatch) -> None:
        contexts = [await filled(router, 140, n) for n in range(3)]
        before = await engine.on_table(lambda table: table.cache_state())
        assert await watch.look() is Level.RED
        assert (await engine.on_table(lambda table: table.cache_state())).hot < before.hot
        assert await watch.look() is Level.NONE
        again = await router.forward_step(StepRequest(contexts[0], 3, GREEDY))
        fresh = await filled(router, 140, 0)
        assert (
            again.token_ids.tolist()
            == (await router.forward_step(StepRequest(fresh, 3, GREEDY))).token_ids.tolist()
        )

    watched(check, FREE, MODEL, hot_share=1.0, total_share=0.5)


def test_a_warm_up_gives_everything_back() -> None:
    async def check(router: RoutedRuntime, engine: LightEngine, watch: AlarmWatch) -> None:
        assert await engine.warm_up() == 24
        assert (await engine.info()).kv_bytes_used == 0
        await filled(router, 144, 0)
        # beside a context too
        assert await engine.warm_up() < 24

    watched(check, FREE, WIDE)


def test_nothing_goes_cold_of_a_context_that_was_not_computed() -> None:
    """An answer, no error: the soak found one."""

    async def check(router: RoutedRuntime, engine: LightEngine, watch: AlarmWatch) -> None:
        ctx = await router.init_context(list(range(40)), ContextPolicy())
        assert (await router.evict_kv(ctx, EvictSelector(2, 40, "cold"))).evicted == ()
        result = await router.forward_step(StepRequest(ctx, 2, GREEDY))
        assert len(result.token_ids) == 2

    watched(check, FREE, HYBRID)
