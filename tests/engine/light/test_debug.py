"""attention_debug: the same tokens, times that add up, and the seed's advice."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.light.debug import DebugTally, PartClock, advice
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest, StepResult
from tests.engine.tiny import ENGINE, HYBRID, MODEL, make_engine

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 83, 110)]
TIMES = ("local_attn_ms", "sparse_attn_ms", "summary_attn_ms", "kv_cache_ms", "other_ms")
MEANS: dict[str, Any] = HYBRID.model_dump()
MEANS["attention"]["hybrid"] |= {"summary_weight": 0.7, "summaries": "mean"}
SUMMARIES = ModelConfig.model_validate(MEANS)


def both(model: ModelConfig, config: EngineConfig = ENGINE) -> tuple[StepResult, StepResult]:
    """One step watched and one not, at the same time in one batch; the same draws."""

    async def main(engine: LightEngine) -> list[StepResult]:
        policy = ContextPolicy(draw=DrawKey(1))
        contexts = [await engine.init_context(PROMPT, policy) for _ in range(2)]
        steps = (
            engine.forward_step(StepRequest(ctx, 5, debug=watched))
            for ctx, watched in zip(contexts, (True, False), strict=True)
        )
        return await asyncio.gather(*steps)

    engine = make_engine(config, model)
    try:
        watched, plain = asyncio.run(main(engine))
    finally:
        engine.close()
    return watched, plain


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MODEL, id="full"),
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(SUMMARIES, id="summaries", marks=pytest.mark.slow),
    ],
)
def test_a_watched_step_samples_the_same(model: ModelConfig) -> None:
    """To the bit; only it has a report, with every part that the model has."""
    watched, plain = both(model)
    np.testing.assert_array_equal(watched.token_ids, plain.token_ids)
    np.testing.assert_array_equal(watched.logprobs, plain.logprobs)
    assert plain.debug is None and watched.debug is not None
    report = watched.debug
    assert all(report[name] >= 0 for name in TIMES)
    assert report["kv_cache_ms"] > 0 and sum(report[name] for name in TIMES) > 0
    assert report["rows"] == 110 + 4 and report["batch_rows"] >= report["rows"]
    if model is MODEL:
        assert report["local_attn_ms"] > 0
        assert report["sparse_attn_hit_rate"] is None
        assert report["sparse_attn_ms"] == report["summary_attn_ms"] == 0
    else:
        assert 0.5 < report["sparse_attn_hit_rate"] <= 1


def test_times_add_up_to_the_whole_less_what_was_asked() -> None:
    tally, clock = DebugTally(), PartClock()
    clock.parts |= {"local": 0.2, "sparse": -0.01, "kv": 0.1}
    clock.extra = 0.3
    tally.add(clock, seconds=1.0, rows=2, batch_rows=8)
    report = tally.report()
    assert report["sparse_attn_ms"] == 0, "a difference of two times below nothing is nothing"
    assert sum(report[name] for name in TIMES) == pytest.approx(700, abs=11)
    assert (report["batches"], report["rows"], report["batch_rows"]) == (1, 2, 8)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("local_attn_ms", "raise attention.hybrid.window"),
        ("sparse_attn_ms", "hit rate 41%: topk is too small or the index misses"),
        ("kv_cache_ms", "lower attention.hot"),
    ],
)
def test_advice_follows_the_rules_of_the_seed(part: str, words: str) -> None:
    """Above 60 %, 50 % and 70 %, one line each; nothing when the parts are even."""
    even: dict[str, float] = dict.fromkeys(TIMES, 20.0)
    assert advice(even, 0.41) == []
    limit = {"local_attn_ms": 0.6, "sparse_attn_ms": 0.5, "kv_cache_ms": 0.7}[part]
    below, above = limit - 0.01, limit + 0.01
    none: dict[str, float] = dict.fromkeys(TIMES, 0.0)
    assert advice({**none, part: below, "other_ms": 1 - below}, 0.41) == []
    (line,) = advice({**none, part: above, "other_ms": 1 - above}, 0.41)
    assert words in line and f"(> {limit:.0%})" in line


def test_batches_of_more_than_eight_are_split() -> None:
    """The seed's option: in pieces of 4, with the same tokens."""

    async def main(engine: LightEngine) -> list[StepResult]:
        prompts = [PROMPT[: 5 + n] for n in range(10)]
        contexts = [
            await engine.init_context(p, ContextPolicy(draw=DrawKey(1, sample=n)))
            for n, p in enumerate(prompts)
        ]
        return await asyncio.gather(*(engine.forward_step(StepRequest(ctx, 6)) for ctx in contexts))

    found: list[list[StepResult]] = []
    for pieces in (0, 4):
        engine = make_engine(ENGINE.model_copy(update={"split_batches": pieces}))
        try:
            plan: Any = [(number, [0]) for number in range(10)]
            sizes = [len(piece) for piece in engine._scheduler._pieces(plan)]
            assert sizes == ([4, 4, 2] if pieces else [10])
            assert [len(piece) for piece in engine._scheduler._pieces(plan[:8])] == [8]
            assert engine._scheduler._pieces([]) == []
            found.append(asyncio.run(main(engine)))
        finally:
            engine.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
