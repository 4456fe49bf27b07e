"""A split of traffic over real engines: shares, stickiness, rollback by errors and by latency."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ContextLost, EngineError, InvalidStateError, NotSupportedError
from engine.light.engine import LightEngine
from engine.runtime.types import ContextId, ContextPolicy, DrawKey, StepRequest, StepResult
from engine.server.rollback import RollbackConfig, wilson_low
from engine.server.traffic import TrafficSplit
from tests.engine.tiny import ENGINE, MODEL, make_engine, make_weights

PROMPT = list(range(1, 20))
QUICK = RollbackConfig(min_steps=10, window=40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(LightEngine):
    """A real engine on a slow machine: each token takes ``seconds`` of ``clock`` more."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(MODEL, ENGINE, fetch_weights=lambda version: make_weights())
        self._clock, self._seconds = clock, seconds

    async def forward_step(self, request: StepRequest) -> StepResult:
        result = await super().forward_step(request)
        self._clock.now += self._seconds * len(result.token_ids)
        return result


class Broken(Slow):
    """Fails every third step, as an engine whose weights have gone bad does."""

    count = 0

    async def forward_step(self, request: StepRequest) -> StepResult:
        self.count += 1
        if self.count % 3 == 0:
            raise EngineError("weight version 2 computed NaN")
        return await super().forward_step(request)


async def ask(split: TrafficSplit, number: int) -> tuple[str, Sequence[int]]:
    policy = ContextPolicy(draw=DrawKey(3, sample=number))
    ctx = await split.init_context(PROMPT, policy)
    try:
        result = await split.forward_step(StepRequest(ctx, 3))
    finally:
        await split.release(ctx)
    return ctx.partition("/")[0], result.token_ids.tolist()


@pytest.fixture
def engines() -> Any:
    made = [make_engine(), make_engine()]
    yield made
    for engine in made:
        engine.close()


def test_shares_are_exact_and_answers_those_of_the_arm(engines: list[LightEngine]) -> None:
    """Nine to one; the same weights on both arms give the same tokens; nothing is left behind."""
    split = TrafficSplit(dict(zip("ab", engines, strict=True)), {"a": 9, "b": 1}, QUICK)

    async def check() -> None:
        answers = [await ask(split, number) for number in range(40)]
        assert Counter(name for name, _ in answers) == {"a": 36, "b": 4}
        alone = TrafficSplit({"a": engines[0]}, {"a": 1}, QUICK)
        assert [ids for _, ids in answers] == [(await ask(alone, n))[1] for n in range(40)]
        assert (await split.info()).num_contexts == 0

    asyncio.run(check())


def test_a_context_stays_on_its_arm(engines: list[LightEngine]) -> None:
    """Also its forks; a foreign id is a lost context."""
    split = TrafficSplit(dict(zip("ab", engines, strict=True)), {"a": 1, "b": 1}, QUICK)

    async def check() -> None:
        first = await split.init_context(PROMPT, ContextPolicy())
        second = await split.init_context(PROMPT, ContextPolicy())
        assert first[0] != second[0]
        assert (await split.fork(second))[0] == second[0]
        await split.append(second, [1, 2])
        assert (await split.get_kv_summary(second)).num_tokens == len(PROMPT) + 2
        with pytest.raises(ContextLost, match="none of the arms a, b"):
            await split.forward_step(StepRequest(ContextId("x/1"), 1))
        with pytest.raises(NotSupportedError, match="load_weights_on"):
            await split.load_weights(make_weights(2))

    asyncio.run(check())


def test_a_failing_canary_is_rolled_back(engines: list[LightEngine]) -> None:
    """Within a few dozen steps, once, and then nobody meets it; it may come back by hand."""
    clock = Clock()
    canary = Broken(clock, 0.0)
    rolled: list[str] = []
    split = TrafficSplit(
        {"stable": engines[0], "canary": canary},
        {"stable": 1, "canary": 1},
        QUICK,
        on_rollback=lambda name, reason: rolled.append(f"{name}: {reason}"),
        clock=clock,
    )

    async def check() -> None:
        failed = 0
        for number in range(60):
            try:
                await ask(split, number)
            except EngineError:
                failed += 1
        assert len(rolled) == 1 and "canary: " in rolled[0] and "steps failed" in rolled[0]
        assert failed <= 8
        assert [arm.weight for arm in split.state()] == [1, 0]
        assert {(await ask(split, number))[0] for number in range(6)} == {"stable"}
        split.set_weight("canary", 1)
        assert {(await ask(split, number))[0] for number in range(2)} == {"stable", "canary"}

    with contextlib.closing(canary):
        asyncio.run(check())


@pytest.mark.parametrize(("seconds", "reason"), [(0.020, "times as long as on"), (0.014, "")])
def test_a_slow_canary_is_rolled_back(seconds: float, reason: str) -> None:
    """Twice the time is, 1.4 times is not."""
    clock = Clock()
    stable, canary = Slow(clock, 0.010), Slow(clock, seconds)
    arms = {"stable": stable, "canary": canary}
    split = TrafficSplit(arms, {"stable": 1, "canary": 1}, QUICK, clock=clock)

    async def check() -> None:
        for number in range(40):
            await ask(split, number)
        state = split.state()[1]
        assert reason in state.reason and bool(state.weight) != bool(reason)

    with contextlib.closing(stable), contextlib.closing(canary):
        asyncio.run(check())


def test_callers_faults_are_not_the_arms(engines: list[LightEngine]) -> None:
    split = TrafficSplit(dict(zip("ab", engines, strict=True)), {"a": 1, "b": 1}, QUICK)

    async def check() -> None:
        for _ in range(60):
            ctx = await split.init_context(PROMPT, ContextPolicy())
            with pytest.raises(InvalidStateError):
                await split.forward_step(StepRequest(ctx, 0))
            await split.release(ctx)
        assert [(arm.errors, arm.weight) for arm in split.state()] == [(0, 1), (0, 1)]

    asyncio.run(check())


def test_a_new_version_on_one_arm(engines: list[LightEngine]) -> None:
    """A canary release: each result names its version, the stable arm keeps its own."""
    split = TrafficSplit(dict(zip("ab", engines, strict=True)), {"a": 1, "b": 1}, QUICK)

    async def check() -> None:
        assert await split.load_weights_on("b", make_weights(7, MODEL, seed=5)) == 7
        versions: dict[str, int] = {}
        for number in range(4):
            ctx = await split.init_context(PROMPT, ContextPolicy(draw=DrawKey(1, sample=number)))
            result = await split.forward_step(StepRequest(ctx, 2))
            versions[ctx[0]] = result.weight_version
        assert versions == {"a": 1, "b": 7}
        assert {arm.name: arm.weight_version for arm in split.state()} == {"a": 1, "b": 7}

    asyncio.run(check())


@given(errors=st.integers(0, 200), more=st.integers(0, 300))
@settings(max_examples=200)
def test_the_bound_is_below_the_rate(errors: int, more: int) -> None:
    total = errors + more
    low = wilson_low(errors, total)
    assert 0 <= low <= (errors / total if total else 0) + 1e-12
    if total:
        # more of the same evidence: a sharper bound
        assert wilson_low(errors * 10, total * 10) >= low - 1e-12


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 0, "b": 0}, "not all 0"),
        ({"a": -1, "b": 1}, "a=-1"),
        ({"a": 1}, "one weight for each arm"),
        ({"a": float("nan"), "b": 1}, "a=nan"),
    ],
)
def test_weights_that_mean_nothing(
    engines: list[LightEngine], weights: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TrafficSplit(dict(zip("ab", engines, strict=True)), weights, QUICK)
