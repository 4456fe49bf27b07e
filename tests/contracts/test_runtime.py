"""Every engine of this repository keeps the MRI contract."""

from __future__ import annotations

from collections.abc import Sequence

from engine.fakes import ScriptedRuntime
from engine.light.engine import LightEngine
from engine.runtime.conformance import ModelRuntimeContract
from engine.runtime.conformance_swaps import SwapContract, ThreadsContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import DrawKey, WeightSet
from tests.engine.tiny import ENGINE, HYBRID, make_engine, make_weights


class TestLightEngine(SwapContract, ThreadsContract):
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


class TestScriptedRuntime(ModelRuntimeContract):
    def make_runtime(self) -> ModelRuntime:
        return ScriptedRuntime(_scramble, vocab_size=64, max_context=96)


def _scramble(tokens: Sequence[int], draw: DrawKey | None) -> int:
    sample = 0 if draw is None else draw.sample
    return (7 * sum(tokens[-3:]) + 5 * len(tokens) + sample) % 64
