"""Every engine of this repository keeps the MRI contract."""

from __future__ import annotations

from engine.adapters.transformers import TransformersRuntime
from engine.chat.vocabulary import Vocabulary
from engine.fakes import ScriptedRuntime
from engine.light.engine import LightEngine
from engine.model.auto import KimiK2Config, PolicyForCausalLM
from engine.model.checkpoint.hub_config import to_hub
from engine.runtime.conformance_kv import KVContract
from engine.runtime.conformance_steps import StepsContract
from engine.runtime.conformance_swaps import SwapContract, ThreadsContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import WeightSet
from tests.contracts.mri_server import scramble
from tests.engine.tiny import ENGINE, HYBRID, MODEL, make_engine, make_model, make_weights

BYTES = Vocabulary(tuple(bytes([32 + i]) for i in range(MODEL.vocab_size)), (0,))
"""A printable character a token."""


class TestLightEngine(SwapContract, ThreadsContract, KVContract, StepsContract):
    def make_runtime(self) -> ModelRuntime:
        return make_engine()

    def make_weights(self, version: int) -> WeightSet:
        return make_weights(version, seed=version)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, LightEngine)
        runtime.close()


class TestFastLightEngine(TestLightEngine):
    """The same engine without fixed tiles."""

    def make_runtime(self) -> ModelRuntime:
        return make_engine(ENGINE.model_copy(update={"deterministic": False}))


class TestCrowdedLightEngine(TestLightEngine):
    """Small blocks, few rows a batch: prompts are computed in chunks."""

    def make_runtime(self) -> ModelRuntime:
        changes = {"block_size": 4, "max_rows": 32, "num_blocks": 90}
        return make_engine(ENGINE.model_copy(update=changes))


class TestHybridLightEngine(TestLightEngine):
    """Tiers and hybrid attention; prompts are computed in chunks, contexts lose their KV."""

    def make_runtime(self) -> ModelRuntime:
        changes = {"max_rows": 32, "num_blocks": 24, "num_warm_blocks": 8}
        return make_engine(ENGINE.model_copy(update=changes), HYBRID)

    def make_weights(self, version: int) -> WeightSet:
        return make_weights(version, HYBRID, seed=version)


class TestScriptedRuntime(KVContract, StepsContract):
    def make_runtime(self) -> ModelRuntime:
        return ScriptedRuntime(scramble, vocab_size=64, max_context=96)


class TestTransformersRuntime(SwapContract, ThreadsContract, KVContract, StepsContract):
    """The reference engine over our model behind transformers' Auto classes."""

    vocabulary = BYTES

    def make_runtime(self) -> ModelRuntime:
        model = PolicyForCausalLM(KimiK2Config(**to_hub(MODEL)), make_model())
        return TransformersRuntime(
            model, max_context=160, max_contexts=128, vocabulary=BYTES, weight_version=1
        )

    def make_weights(self, version: int) -> WeightSet:
        return make_weights(version, seed=version)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, TransformersRuntime)
        runtime.close()
