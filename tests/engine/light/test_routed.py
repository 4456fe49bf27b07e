"""RoutedRuntime over a real LightEngine: loads, limits, cancelled and impatient callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from engine.errors import CapacityError, DeadlineExceeded, Overloaded, RateLimited
from engine.light.engine import LightEngine
from engine.light.rate import RateClass
from engine.light.routed import RoutedRuntime
from engine.light.waiting_room import RouterConfig
from engine.runtime.types import ContextId, ContextPolicy, DrawKey, StepRequest, StepResult
from tests.engine.tiny import ENGINE, make_engine

Check = Callable[[RoutedRuntime, LightEngine], Awaitable[None]]
PROMPT = list(range(1, 40))
BYTES = 1000
"""Pretended size of a token: the rules are about sums."""


def routed(
    check: Callable[[RoutedRuntime, LightEngine], Awaitable[None]], **config: object
) -> None:
    engine = make_engine()
    total = ENGINE.num_blocks * ENGINE.block_size * BYTES
    router = RoutedRuntime(
        engine,
        RouterConfig.model_validate(config),
        kv_bytes=lambda tokens: tokens * BYTES,
        kv_bytes_total=total,
    )
    try:
        asyncio.run(asyncio.wait_for(check(router, engine), timeout=60))
    finally:
        engine.close()


async def opened(router: RoutedRuntime, sample: int = 0, **policy: object) -> ContextId:
    values = {"draw": DrawKey(3, sample=sample), **policy}
    return await router.init_context(PROMPT, ContextPolicy(**values))  # type: ignore[arg-type]


def test_many_clients_get_what_they_would_alone() -> None:
    """60 at once through 4 places: the same tokens as from the engine, nobody lost."""

    async def one(router: RoutedRuntime | LightEngine, sample: int) -> list[int]:
        policy = ContextPolicy(draw=DrawKey(3, sample=sample))
        ctx = await router.init_context(PROMPT, policy)
        result = await router.forward_step(StepRequest(ctx, 6))
        await router.release(ctx)
        return result.token_ids.tolist()

    async def check(router: RoutedRuntime, engine: LightEngine) -> None:
        found = await asyncio.gather(*(one(router, sample) for sample in range(60)))
        assert found == [await one(engine, sample) for sample in range(60)]
        state = router.state()
        assert (state.waiting, state.running) == (0, 0)
        assert state.counts.began == state.counts.ended == 60 and state.counts.peaks == 1
        assert (await engine.info()).num_contexts == 0

    routed(check, max_running=4, max_waiting=60, waiting_factor=60)


def test_a_full_router_sheds_and_serves_the_rest() -> None:
    """429 for what has no room; those that were let in get their tokens."""

    async def check(router: RoutedRuntime, engine: LightEngine) -> None:
        contexts = [await opened(router, sample) for sample in range(12)]
        results = await asyncio.gather(
            *(router.forward_step(StepRequest(ctx, 4)) for ctx in contexts), return_exceptions=True
        )
        served = [r for r in results if isinstance(r, StepResult)]
        shed = [r for r in results if isinstance(r, Overloaded)]
        assert len(served) == 2 + 4 and len(shed) == 6
        assert all(len(r.token_ids) == 4 for r in served)
        assert all(r.retry_after_s >= 1 for r in shed)
        # who was shed lost nothing: the context is as it was
        again = await router.forward_step(StepRequest(contexts[-1], 4))
        assert again.start == len(PROMPT)

    routed(check, max_running=2, reserved=0, waiting_factor=2)


def test_a_rate_class_pays_for_prompt_and_answer() -> None:
    """And gets back what was not sampled; other classes do not notice."""

    async def check(router: RoutedRuntime, engine: LightEngine) -> None:
        ctx = await opened(router, rate_class="free")
        await router.forward_step(StepRequest(ctx, 11))  # 39 + 11 of 60
        other = await opened(router, rate_class="free")
        with pytest.raises(RateLimited, match="rate class 'free' has used up") as refused:
            await router.forward_step(StepRequest(other, 11))
        assert refused.value.retry_after_s == pytest.approx(40.0, abs=1.0)
        paid = await opened(router, rate_class="paid")
        await router.forward_step(StepRequest(paid, 11))
        assert router.state().counts.rate_limited == 1
        # a follow-up pays for what is new only
        await router.append(ctx, [1, 2])
        stopped = await router.forward_step(StepRequest(ctx, 8, stop_ids=tuple(range(83))))
        assert len(stopped.token_ids) == 1
        await router.forward_step(StepRequest(ctx, 7))  # 2 + 1 paid, 7 of the 8 came back

    routed(check, classes={"free": RateClass(tokens_per_s=1.0, burst_tokens=60.0)})


def test_waiting_ends_by_deadline_and_by_cancel() -> None:
    """Neither leaves a place behind, nor a context in a state that forbids the next step."""

    async def check(router: RoutedRuntime, engine: LightEngine) -> None:
        first, second, third = [await opened(router, sample) for sample in range(3)]
        long = asyncio.create_task(router.forward_step(StepRequest(first, 110)))
        await asyncio.sleep(0)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await router.forward_step(StepRequest(second, 4, deadline_s=0.02))
        assert time.monotonic() - started < 5
        waiting = asyncio.create_task(router.forward_step(StepRequest(third, 4)))
        await asyncio.sleep(0.01)
        await router.cancel(third)
        result = await waiting
        assert result.finish == "cancelled" and len(result.token_ids) == 0
        left = asyncio.create_task(router.forward_step(StepRequest(second, 4)))
        await asyncio.sleep(0.01)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await long
        assert (router.state().running, router.state().waiting) == (0, 0)
        assert len((await router.forward_step(StepRequest(third, 4))).token_ids) == 4

    routed(check, max_running=1, reserved=0)


def test_kv_bytes_bound_what_runs_together() -> None:
    """A step reserves what it may grow to; one that can never fit is refused at once."""

    async def check(router: RoutedRuntime, engine: LightEngine) -> None:
        ctx = await opened(router)
        with pytest.raises(CapacityError, match="bytes of KV cache"):
            await router.forward_step(StepRequest(ctx, 1_000_000))
        assert len((await router.forward_step(StepRequest(ctx, 4))).token_ids) == 4

    routed(check)


def test_a_router_that_refuses_lets_running_ones_end() -> None:
    """What the red alarm does; new contexts hear why."""

    async def check(router: RoutedRuntime, engine: LightEngine) -> None:
        ctx = await opened(router)
        running = asyncio.create_task(router.forward_step(StepRequest(ctx, 20)))
        await asyncio.sleep(0)
        router.refuse("KV cache is full")
        with pytest.raises(Overloaded, match="KV cache is full"):
            await opened(router, 1)
        assert len((await running).token_ids) == 20
        router.refuse("")
        await opened(router, 2)

    routed(check)
