"""Real vLLM (CPU build) behind MRI: the contract, and its silent traps, each shown and repaired.

Runs in vLLM's own environment: make evidence-engines.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM here (scripts/engine-venvs.sh vllm)", allow_module_level=True)

from engine.adapters.vllm import VllmOptions, VllmRuntime
from engine.chat.vocabulary import Vocabulary
from engine.errors import WeightsError
from engine.runtime.conformance_kv import KVContract
from engine.runtime.conformance_steps import StepsContract
from engine.runtime.conformance_swaps import SwapContract, ThreadsContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest, WeightSet
from engine.runtime.weights import make_weight_set
from tests.engine.adapters.tiny_hub import DEEPSEEK, LLAMA, make_set, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
T = TypeVar("T")
BYTES = Vocabulary(tuple(bytes([32 + i]) for i in range(LLAMA.vocab_size)), (0,))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRuntime]:
    folder = save_tiny(LLAMA, tmp_path_factory.mktemp("llama"))
    runtime = VllmRuntime(folder, VllmOptions(max_context=160), vocabulary=BYTES)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRuntime]:
    folder = save_tiny(DEEPSEEK, tmp_path_factory.mktemp("deepseek"))
    runtime = VllmRuntime(folder, VllmOptions(max_context=160))
    yield runtime
    runtime.close()


class TestVllm(SwapContract, ThreadsContract, KVContract, StepsContract):
    """One engine for all tests; each leaves it with no context."""

    vocabulary = BYTES
    timeout_s = 600.0

    @pytest.fixture(autouse=True)
    def _use(self, llama: VllmRuntime) -> None:
        self.engine = llama

    def make_runtime(self) -> ModelRuntime:
        return self.engine

    def make_weights(self, version: int) -> WeightSet:
        return make_set(LLAMA, version)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, VllmRuntime)
        for context in runtime._contexts.all():
            await runtime.release(context.id)


def test_declines_two_methods_and_no_more(llama: VllmRuntime):
    """As info() says: the account and the eviction of one context's KV."""
    have = run(llama, llama.info()).capabilities
    assert {"kv_summary", "evict"}.isdisjoint(have)
    assert {"logprobs", "fork", "draws", "stream", "sampling", "deadline"} <= have


def test_trap_b_a_tied_head_follows_the_embedding(llama: VllmRuntime):
    """Every tensor is new after an update, also the packed copy of the embedding."""
    for version in (11, 12):
        weights = make_set(LLAMA, version)
        assert run(llama, llama.load_weights(weights)) == version
        check_against_reference(llama, weights)


def test_trap_b_shows_without_the_repair(llama: VllmRuntime):
    """The probe catches it, and the engine goes on with the weights it had."""
    good = make_set(LLAMA, 21)
    run(llama, llama.load_weights(good))
    object.__setattr__(llama.options, "fix_ups", False)
    try:
        with pytest.raises(WeightsError, match="probe's logprobs are off"):
            # the restart that follows must repair
            run(llama, _unrepaired(llama, make_set(LLAMA, 22)))
    finally:
        object.__setattr__(llama.options, "fix_ups", True)
    assert run(llama, llama.info()).weight_version == 21
    check_against_reference(llama, good)


def test_trap_d_a_bad_set_never_reaches_vllm(llama: VllmRuntime):
    """A name that vLLM does not know would leave it dead."""
    before = run(llama, llama.info()).weight_version
    process = llama._engine
    good = make_set(LLAMA, 31)
    bad = make_weight_set(31, good.tensors | {"layers.0.mlp.extra": np.zeros(3, np.float32)}, {})
    with pytest.raises(WeightsError, match="unknown"):
        run(llama, llama.load_weights(bad))
    assert llama._engine is process
    assert run(llama, llama.info()).weight_version == before


def test_trap_d_a_failed_update_restarts_the_engine(llama: VllmRuntime):
    """What breaks inside vLLM poisons it: a new one serves the last good weights."""
    good = make_set(LLAMA, 41)
    run(llama, llama.load_weights(good))
    process = llama._engine

    async def broken() -> int:
        # a file that ends early, as after a full /dev/shm
        from engine.adapters import vllm

        whole = vllm.write_shared

        def torn(weights: WeightSet) -> Path:
            path = whole(weights)
            if weights.manifest.version == 42:
                path.write_bytes(path.read_bytes()[:2000])
            return path

        vllm.write_shared = torn
        try:
            return await llama.load_weights(make_set(LLAMA, 42))
        finally:
            vllm.write_shared = whole

    with pytest.raises(WeightsError, match="started again with version 41"):
        run(llama, broken())
    assert llama._engine is not process
    check_against_reference(llama, good)


def test_traps_a_and_c_experts_and_latent_attention(deepseek: VllmRuntime):
    """Experts are packed again after an update, and plain RoPE is right: logprobs in fp32 are those
    of our own model, before and after."""
    check_against_reference(deepseek, make_set(DEEPSEEK, 0))
    weights = make_set(DEEPSEEK, 1)
    assert run(deepseek, deepseek.load_weights(weights)) == 1
    check_against_reference(deepseek, weights)


def test_trap_a_shows_without_the_repair(deepseek: VllmRuntime):
    """The same weights, loaded again, are garbage: the probe catches it."""
    good = make_set(DEEPSEEK, 2)
    run(deepseek, deepseek.load_weights(good))
    object.__setattr__(deepseek.options, "fix_ups", False)
    try:
        with pytest.raises(WeightsError, match="probe's logprobs are off"):
            run(deepseek, _unrepaired(deepseek, make_set(DEEPSEEK, 3)))
    finally:
        object.__setattr__(deepseek.options, "fix_ups", True)
    check_against_reference(deepseek, good)


def test_tokens_are_light_engine_s(llama: VllmRuntime):
    """One set of weights, one draw key: the same tokens from both engines, logprobs to 1e-4."""
    from engine.config import EngineConfig
    from engine.light.engine import LightEngine

    weights = make_set(LLAMA, 51)
    run(llama, llama.load_weights(weights))
    light = LightEngine(
        LLAMA, EngineConfig(max_context=160, num_blocks=64), fetch_weights=lambda _: weights
    )
    policy = ContextPolicy(draw=DrawKey(3, sample=2))

    async def sampled(runtime: ModelRuntime) -> Any:
        ctx = await runtime.init_context([5, 6, 7, 8], policy)
        result = await runtime.forward_step(StepRequest(ctx, 40))
        await runtime.release(ctx)
        return result

    try:
        ours = run(llama, sampled(light))
    finally:
        light.close()
    theirs = run(llama, sampled(llama))
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


async def _unrepaired(runtime: VllmRuntime, weights: WeightSet) -> int:
    restart = runtime._restart

    async def repaired() -> None:
        object.__setattr__(runtime.options, "fix_ups", True)
        await restart()

    runtime._restart = repaired
    try:
        return await runtime.load_weights(weights)
    finally:
        runtime._restart = restart


def check_against_reference(runtime: VllmRuntime, weights: WeightSet) -> None:
    ids = [(7 * i + 3) % runtime._config.vocab_size for i in range(24)]
    found = runtime._thread.run_blocking(runtime.score(ids))
    np.testing.assert_allclose(found, runtime._own_reference(weights, ids), atol=2e-4)


def run(runtime: VllmRuntime, call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)
