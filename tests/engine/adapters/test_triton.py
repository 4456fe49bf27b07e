"""A real Triton Inference Server behind MRI: the contract, nothing declined.

Runs in the environment of nvidia-pytriton: make evidence-engines.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

if importlib.util.find_spec("pytriton") is None:
    pytest.skip("no Triton here (scripts/engine-venvs.sh triton)", allow_module_level=True)

from engine.adapters.triton_export import export_repository
from engine.adapters.triton_server import TritonRuntime, TritonServer
from engine.chat.hf_tokenizer import HFTokenizer
from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.light.engine import LightEngine
from engine.runtime.conformance_kv import KVContract
from engine.runtime.conformance_steps import StepsContract
from engine.runtime.conformance_swaps import SwapContract, ThreadsContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest, StepResult, WeightSet
from tests.engine.adapters.tiny_hub import TEXT, byte_tokenizer, make_set, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
VOCABULARY = Vocabulary.of(HFTokenizer(byte_tokenizer()))
CONFIG = EngineConfig(max_context=160, num_blocks=512, max_contexts=128, max_rows=96)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    export_repository(
        save_tiny(TEXT, folder / "model", tokenizer=True), folder / "repository", CONFIG
    )
    server = TritonServer(folder / "repository")
    yield server
    server.close()


class TestTriton(SwapContract, ThreadsContract, KVContract, StepsContract):
    vocabulary = VOCABULARY

    @pytest.fixture(autouse=True)
    def _use(self, served: TritonServer) -> None:
        self.served = served

    def make_runtime(self) -> ModelRuntime:
        return TritonRuntime(self.served.address)

    def make_weights(self, version: int) -> WeightSet:
        return make_set(TEXT, version)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, TritonRuntime)
        await runtime.aclose()


def test_declines_no_method(served: TritonServer):
    """Every capability of LightEngine crosses."""

    async def asked() -> frozenset[str]:
        runtime = TritonRuntime(served.address)
        info = await runtime.info()
        await runtime.aclose()
        return info.capabilities

    light = LightEngine(TEXT, CONFIG, vocabulary=VOCABULARY)
    try:
        expected = asyncio.run(light.info()).capabilities
    finally:
        light.close()
    assert asyncio.run(asked()) == expected
    assert {"evict", "kv_summary", "fork", "stream", "stop_texts", "constraints"} <= expected


def test_same_bits_as_in_process(served: TritonServer):
    """Tokens and logprobs cross unchanged."""
    weights = make_set(TEXT, 7)

    async def sampled(runtime: ModelRuntime) -> StepResult:
        await runtime.load_weights(weights)
        ctx = await runtime.init_context([5, 6, 7], ContextPolicy(draw=DrawKey(3)))
        result = await runtime.forward_step(StepRequest(ctx, 24))
        await runtime.release(ctx)
        return result

    light = LightEngine(TEXT, CONFIG)
    remote = TritonRuntime(served.address)
    try:
        here, there = asyncio.run(sampled(light)), asyncio.run(sampled(remote))
    finally:
        light.close()
        remote.close()
    np.testing.assert_array_equal(here.token_ids, there.token_ids)
    np.testing.assert_array_equal(here.logprobs, there.logprobs)


def test_a_server_that_is_not_there():
    """One clear line."""

    async def asked() -> None:
        runtime = TritonRuntime("127.0.0.1:9", timeout_s=20)
        try:
            await runtime.info()
        finally:
            await runtime.aclose()

    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        asyncio.run(asked())
