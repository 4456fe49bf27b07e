"""LightEngine with tiers and hybrid attention: the same bits however a context was computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.recorded import CodeFlips, RecordedCodes
from engine.attention.sequence import attend_sequence
from engine.attention.topology import warm_end
from engine.config import EngineConfig
from engine.errors import CapacityError, NotSupportedError
from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.runtime.types import ContextPolicy, DrawKey, EvictSelector, StepRequest, StepResult
from infra.errors import ConfigError
from tests.engine.tiny import ENGINE, HYBRID, MLA, MODEL, make_engine, make_model, make_weights

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 83, 115)]
OBSERVED = [3, 1, 4, 1, 5, 9, 2, 6, 5]
CONFIG = ENGINE.model_copy(update={"max_context": 200})


def hybrid(model: ModelConfig = HYBRID, **changes: Any) -> ModelConfig:
    """``changes`` to the attention section; hybrid ones merge."""
    attention = HYBRID.attention.model_dump() | {"kind": model.attention.kind}
    attention["hybrid"] |= changes.pop("hybrid", {})
    return ModelConfig.model_validate(model.model_dump() | {"attention": attention | changes})


TORCH = hybrid(MODEL)
"""Heads of 12 numbers: the torch reference instead of native code."""
LATENT = hybrid(MLA)


@dataclass(frozen=True, slots=True)
class Trace:
    """What must be equal bit for bit."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray
    selections: np.ndarray
    codes: np.ndarray

    @classmethod
    def of(cls, results: Sequence[StepResult]) -> Trace:
        assert all(r.experts is not None and r.selections is not None for r in results)
        parts = [result.codes for result in results if result.codes is not None]
        starts = [result.codes_start for result in results]
        assert starts == [1 + sum(len(p) for p in parts[:i]) for i in range(len(results))]
        return cls(
            np.concatenate([result.token_ids for result in results]),
            np.concatenate([result.logprobs for result in results]),
            np.concatenate([r.experts for r in results if r.experts is not None]),
            np.concatenate([r.selections for r in results if r.selections is not None]),
            np.concatenate(parts),
        )

    def check(self, other: Trace) -> None:
        np.testing.assert_array_equal(self.token_ids, other.token_ids)
        np.testing.assert_array_equal(self.logprobs, other.logprobs)
        np.testing.assert_array_equal(self.experts, other.experts)
        np.testing.assert_array_equal(self.selections, other.selections)
        np.testing.assert_array_equal(self.codes, other.codes)


def policy(sample: int) -> ContextPolicy:
    return ContextPolicy(kv="tiered", deterministic=True, draw=DrawKey(11, sample=sample))


async def turns(engine: LightEngine, ctx: Any) -> list[StepResult]:
    """Two turns with an observation between."""
    first = await engine.forward_step(StepRequest(ctx, 20))
    await engine.append(ctx, OBSERVED)
    return [first, await engine.forward_step(StepRequest(ctx, 20))]


async def episode(engine: LightEngine, prompt: list[int], sample: int) -> list[StepResult]:
    ctx = await engine.init_context(prompt, policy(sample))
    results = await turns(engine, ctx)
    await engine.release(ctx)
    return results


def run(
    check: Callable[[LightEngine], Awaitable[Any]],
    model: ModelConfig = HYBRID,
    config: EngineConfig = CONFIG,
) -> Any:
    engine = make_engine(config, model)
    try:
        return asyncio.run(asyncio.wait_for(check(engine), timeout=300))
    finally:
        engine.close()


def alone_in(model: ModelConfig, config: EngineConfig = CONFIG) -> list[StepResult]:
    return run(lambda engine: episode(engine, PROMPT, 5), model, config)


@pytest.fixture(scope="module")
def results() -> list[StepResult]:
    return alone_in(HYBRID)


@pytest.fixture(scope="module")
def alone(results: list[StepResult]) -> Trace:
    return Trace.of(results)


def test_the_tiers_are_used(results: list[StepResult], alone: Trace):
    """Codes are read and far tokens retrieved in every step; reports cover every fed position."""
    assert all(result.warm_reads > 0 and result.retrieved > 0 for result in results)
    assert [result.experts_start for result in results] == [0, len(PROMPT) + 19]
    assert alone.selections.shape == (len(PROMPT) + 48, 3, 2, 2, 8)
    # blocks 1 to 3 of 163 positions; 16 keys, values, their scales and minima in 3 layers, 2 heads
    assert [result.codes_start for result in results] == [1, 3]
    assert alone.codes.shape == (3, 3 * 2 * (32 * (16 + 16 + 2) + 4 * 16))
    for position, selected in enumerate(alone.selections):
        far = selected[selected >= 0]
        assert ((far >= 32) & (far < position + 1 - 16)).all()
        assert len(far) or position + 1 - 16 <= 32


# -- bits ------------------------------------------------------------------------------------------


def test_alone_is_in_a_batch(alone: Trace):
    """15 neighbours with other prompts, lengths and draws."""

    async def crowd(engine: LightEngine) -> Trace:
        rng = np.random.default_rng(1)
        prompts = [rng.integers(0, 83, rng.integers(1, 150)).tolist() for _ in range(16)]
        prompts[9] = PROMPT
        calls = [episode(engine, p, 5 if i == 9 else 100 + i) for i, p in enumerate(prompts)]
        return Trace.of((await asyncio.gather(*calls))[9])

    run(crowd).check(alone)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 32])
def test_prefill_in_chunks(alone: Trace, chunk: int):
    """However the prompt arrives, and whatever forks look at it meanwhile."""

    async def chunked(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT[:1], policy(5))
        for start in range(1, len(PROMPT), chunk):
            await engine.append(ctx, PROMPT[start : start + chunk])
            # a fork computes all of the parent's tokens but the last
            await engine.release(await engine.fork(ctx))
        return Trace.of(await turns(engine, ctx))

    run(chunked).check(alone)


def test_fork(alone: Trace):
    """A child that shares its parent's blocks in both tiers, twice removed; the parent goes on."""

    async def forked(engine: LightEngine) -> Trace:
        parent = await engine.init_context(PROMPT, policy(0))
        middle = await engine.fork(parent, policy(1))
        await engine.forward_step(StepRequest(parent, 40))
        return Trace.of(await turns(engine, await engine.fork(middle, policy(5))))

    run(forked).check(alone)


@pytest.mark.parametrize(("start", "kept"), [(0, 0), (40, 0), (130, 128)])
def test_rebuilt_after_evict(alone: Trace, start: int, kept: int):
    """Old blocks cannot be computed again alone: all go. Only the newest can."""

    async def rebuilt(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT, policy(5))
        first = await engine.forward_step(StepRequest(ctx, 20))
        await engine.append(ctx, OBSERVED)
        gone = await engine.evict_kv(ctx, EvictSelector(start, start + 2))
        assert gone.evicted[0][0] == kept and gone.evicted[-1][1] == 134 and gone.freed_bytes > 0
        summary = await engine.get_kv_summary(ctx)
        assert summary.num_hot + summary.num_warm == kept
        return Trace.of([first, await engine.forward_step(StepRequest(ctx, 20))])

    run(rebuilt).check(alone)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["int8", "mean"])
def test_an_index_that_learns_forgets_what_was_dropped(index: str):
    """Kept between steps, shared by no fork, learnt again after eviction: the bits of a context
    that was computed at once."""
    model = hybrid(hybrid={"index": index})
    alone = Trace.of(alone_in(model))

    async def disturbed(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT[:100], policy(5))
        other = await engine.fork(ctx, policy(6))
        await engine.forward_step(StepRequest(other, 40))
        await engine.append(ctx, PROMPT[100:])
        child = await engine.fork(ctx)
        await engine.release(other)
        first = await engine.forward_step(StepRequest(child, 20))
        await engine.append(child, OBSERVED)
        await engine.evict_kv(child, EvictSelector(40, 42))
        return Trace.of([first, await engine.forward_step(StepRequest(child, 20))])

    run(disturbed, model).check(alone)


def test_rebuilt_in_another_engine(alone: Trace):
    """Given the tokens of the first turn it goes on as the lost one would have."""

    async def rebuilt(engine: LightEngine) -> StepResult:
        ctx = await engine.init_context(
            PROMPT + alone.token_ids[:20].tolist() + OBSERVED, policy(5)
        )
        return await engine.forward_step(StepRequest(ctx, 20))

    result = run(rebuilt)
    np.testing.assert_array_equal(result.logprobs, alone.logprobs[20:])
    np.testing.assert_array_equal(result.selections, alone.selections)
    np.testing.assert_array_equal(result.codes, alone.codes)


@pytest.mark.slow
@pytest.mark.parametrize("pools", [(9, 64), (64, 6)])
def test_short_pools(alone: Trace, pools: tuple[int, int]):
    """Contexts that lost their KV for lack of room in either pool compute it again, bit for bit."""

    async def squeezed(engine: LightEngine) -> Trace:
        ctx = await engine.init_context(PROMPT, policy(5))
        others = [await engine.init_context(PROMPT[i:], policy(50 + i)) for i in range(4)]
        crowd = [asyncio.ensure_future(engine.forward_step(StepRequest(o, 60))) for o in others]
        results = await turns(engine, ctx)
        await asyncio.gather(*crowd)
        return Trace.of(results)

    changes = {"num_blocks": pools[0], "num_warm_blocks": pools[1]}
    run(squeezed, config=CONFIG.model_copy(update=changes)).check(alone)


@pytest.mark.slow
@pytest.mark.parametrize("model", [TORCH, LATENT], ids=["torch", "latent"])
def test_the_torch_reference_keeps_bits_too(model: ModelConfig):
    """Head sizes that native code does not know."""

    async def crowd(engine: LightEngine) -> Trace:
        calls = [episode(engine, PROMPT[:n], 5 if n > 110 else n) for n in (30, 115, 77)]
        return Trace.of((await asyncio.gather(*calls))[1])

    run(crowd, model).check(Trace.of(alone_in(model)))


# -- the same policy elsewhere ---------------------------------------------------------------------


def test_a_hot_zone_longer_than_the_context_is_full_attention():
    """Nothing is coded, everything is in the window: the logprobs of mode full."""
    full = ModelConfig.model_validate(HYBRID.model_dump() | {"attention": {}})
    wide = hybrid(hot=512, hybrid={"window": 512})

    async def plain(engine: LightEngine) -> StepResult:
        ctx = await engine.init_context(PROMPT, ContextPolicy(draw=DrawKey(11, sample=5)))
        return await engine.forward_step(StepRequest(ctx, 30))

    expected, found = run(plain, full), run(plain, wide)
    np.testing.assert_array_equal(expected.token_ids, found.token_ids)
    np.testing.assert_allclose(expected.logprobs, found.logprobs, atol=1e-5)
    assert (found.warm_reads, found.retrieved) == (0, 0)
    assert expected.selections is None and (found.selections == -1).all()


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        HYBRID,
        *(
            pytest.param(model, marks=pytest.mark.slow)
            for model in (
                LATENT,
                hybrid(profile="k8v4", hybrid={"topk_shared": True}),
                hybrid(hybrid={"dense_below": 130, "topk_unit": "block", "topk": 2}),
                hybrid(hybrid={"index": "int8"}),
                hybrid(hybrid={"index": "mean"}),
            )
        ),
    ],
    ids=["token", "latent", "shared-k8v4", "dense-block", "int8", "mean"],
)
def test_the_sequence_forward_is_the_engines(model: ModelConfig, replay: bool):
    """attend_sequence over the whole context, as a learner would: 1e-4, and the same choices."""
    results = alone_in(model)
    trace = Trace.of(results)
    tokens = PROMPT + trace.token_ids[:20].tolist() + OBSERVED + trace.token_ids[20:].tolist()
    attention = model.attention
    recorded_codes = RecordedCodes(
        torch.from_numpy(trace.codes)[None],
        torch.tensor([len(trace.codes)]),
        CacheLayout.of(model, attention.profile),
    )
    assert len(trace.codes) == warm_end(len(tokens) - 1, attention.hot) // 32 - 1
    code_flips = CodeFlips()
    flips = 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal flips
        recorded = torch.from_numpy(trace.selections[:, layer])
        latent = model.is_mla
        done = attend_sequence(
            q,
            k,
            None if latent else v,
            attention.hybrid,
            attention.hot,
            attention.profile,
            value_dim=v.shape[2] if latent else None,
            replay=recorded if replay else None,
            recorded=recorded_codes.layer(layer) if replay else None,
            flips=code_flips,
        )
        flips += int((done.selected != recorded).sum())
        return done.out

    policy_model = make_model(model)
    ids = torch.tensor(tokens[:-1])
    experts = torch.from_numpy(trace.experts.astype(np.int64))
    with torch.no_grad():
        hidden, _ = policy_model(
            ids, torch.arange(len(ids)), attend, experts=experts, absorbed=model.is_mla
        )
        logprobs = policy_model.logits(hidden).log_softmax(dim=-1)
    sampled = [len(PROMPT) + i for i in range(20)]
    sampled += [len(PROMPT) + 20 + len(OBSERVED) + i for i in range(20)]
    found = [float(logprobs[p - 1, tokens[p]]) for p in sampled]
    np.testing.assert_allclose(found, trace.logprobs, atol=1e-5 if replay else 1e-3)
    # every stored number was compared, and few differ
    assert code_flips.recorded == (_stored_numbers(model) * len(trace.codes) if replay else 0)
    assert code_flips.flips <= 0.002 * code_flips.recorded
    assert flips <= 0.001 * trace.selections.size


def _stored_numbers(model: ModelConfig) -> int:
    """Codes, scales and minima of a block."""
    keys, values = model.cached_key_dim, 0 if model.is_mla else model.cached_value_dim
    groups = -(-values // 32) * 2 if model.attention.profile == "k8v4" else bool(values)
    return model.num_hidden_layers * model.cached_heads * (34 * keys + 32 * (values + groups))


def test_codes_are_reported_only_where_wanted():
    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, policy(5))
        child = await engine.fork(ctx)
        results = [await engine.forward_step(StepRequest(c, 20)) for c in (ctx, child)]
        assert [r.codes for r in results] == [None, None] and all(r.warm_reads for r in results)

    run(check, config=CONFIG.model_copy(update={"report_codes": False}))


# -- tiers -----------------------------------------------------------------------------------------


def test_the_account_names_the_tiers():
    """164 tokens: the sink, what is hot, three warm blocks; shared ones count for each context."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, policy(5))
        await turns(engine, ctx)
        child = await engine.fork(ctx)
        for name in (ctx, child):
            await engine.evict_kv(name, EvictSelector(0, 0))
            summary = await engine.get_kv_summary(name)
            assert summary.num_tokens == 164
            assert (summary.num_hot, summary.num_warm, summary.num_cold) == (67, 96, 0)
        info = await engine.info()
        assert {"tiered", "rewarm"} <= info.capabilities
        await engine.release(ctx)
        assert (await engine.info()).kv_bytes_used == info.kv_bytes_used > 0
        await engine.release(child)
        assert (await engine.info()).kv_bytes_used == 0

    run(check)


@pytest.mark.parametrize("cold", ["host", "disk"])
def test_cold_blocks_come_back(cold: str, tmp_path: Any):
    """Old blocks leave the device and are not read; after rewarm_kv they are, to the same bits as
    in an engine that kept them."""
    tiers = TierConfig.model_validate(
        {
            "warm": 32,
            "cold": cold,
            "directory": tmp_path,
            "host_bytes": 0 if cold == "disk" else 1 << 20,
        }
    )

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, policy(5))
        await engine.forward_step(StepRequest(ctx, 50))
        await engine.evict_kv(ctx, EvictSelector(0, 0))
        before = await engine.get_kv_summary(ctx)
        assert before.num_cold == 64
        without, whole = await engine.fork(ctx), await engine.fork(ctx)
        first = await engine.forward_step(StepRequest(without, 1))
        assert (
            first.selections is not None and not np.isin(first.selections[-1], range(32, 96)).any()
        )
        back = await engine.rewarm_kv(whole, EvictSelector(40, 90))
        assert back.loaded[:2] == ((32, 64), (64, 96)) and not back.lost
        second = await engine.forward_step(StepRequest(whole, 1))
        assert second.selections is not None and np.isin(second.selections[-1], range(32, 96)).any()
        assert (first.warm_reads, second.warm_reads) == (32, 96)

    run(check, config=CONFIG.model_copy(update={"tiers": tiers}))


def test_new_weights_make_all_tiers_stale():
    """A context that lived through a swap = a fresh one under the new weights."""

    async def check(engine: LightEngine) -> None:
        old = await engine.init_context(PROMPT, policy(5))
        first = await engine.forward_step(StepRequest(old, 20))
        await engine.load_weights(make_weights(2, HYBRID, seed=5))
        second = await engine.forward_step(StepRequest(old, 4))
        fresh = await engine.init_context(PROMPT + first.token_ids.tolist(), policy(5))
        expected = await engine.forward_step(StepRequest(fresh, 4))
        np.testing.assert_array_equal(second.logprobs, expected.logprobs)

    run(check)


# -- refusals --------------------------------------------------------------------------------------


def test_a_context_larger_than_the_pools_is_refused_with_numbers():
    """The failed step leaves the context as it was, and its KV ready to go on from there."""

    async def check(engine: LightEngine) -> None:
        ctx = await engine.init_context(PROMPT, policy(5))
        expected = await engine.forward_step(StepRequest(await engine.fork(ctx), 10))
        with pytest.raises(
            CapacityError, match=r"1 warm KV blocks wanted, \d of 12 and 0 of 1 free"
        ):
            await engine.forward_step(StepRequest(ctx, 60))
        assert (await engine.get_kv_summary(ctx)).num_tokens == len(PROMPT)
        result = await engine.forward_step(StepRequest(ctx, 10))
        np.testing.assert_array_equal(result.logprobs, expected.logprobs)

    run(check, config=CONFIG.model_copy(update={"num_blocks": 12, "num_warm_blocks": 1}))


def test_what_an_engine_does_not_run_is_refused():
    """kv="full" by a hybrid engine, and the other way round."""

    async def check(engine: LightEngine) -> None:
        with pytest.raises(NotSupportedError, match=r"kv='full'.*serves kv='tiered'"):
            await engine.init_context(PROMPT, ContextPolicy(kv="full"))

    async def check_full(engine: LightEngine) -> None:
        with pytest.raises(NotSupportedError, match=r"kv='tiered'.*serves kv='full'"):
            await engine.init_context(PROMPT, ContextPolicy(kv="tiered"))
        ctx = await engine.init_context(PROMPT, ContextPolicy(kv="full"))
        with pytest.raises(NotSupportedError, match="no cold KV"):
            await engine.rewarm_kv(ctx, EvictSelector(0, 1))

    run(check)
    run(check_full, MODEL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 16}, "block_size=16, .* blocks of 32"),
        ({"tiers": TierConfig(hot=96)}, "tiers.hot=96, but attention.hot=32 decides it"),
        ({"tiers": TierConfig(profile="literal")}, "tiers.profile=literal"),
        ({"tiers": TierConfig(deterministic=False)}, "but engine.deterministic=True decides it"),
    ],
)
def test_sections_that_disagree_are_refused(changes: dict[str, Any], words: str):
    """One place for each knob."""
    with pytest.raises(ConfigError, match=words) as refused:
        LightEngine(HYBRID, CONFIG.model_copy(update=changes))
    assert "\n" not in str(refused.value)
