"""The native step keeps the MRI contract that every engine keeps."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.light import native
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.runtime.conformance_kv import KVContract
from engine.runtime.conformance_steps import StepsContract
from engine.runtime.conformance_swaps import SwapContract, ThreadsContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import WeightSet
from tests.engine.tiny import ENGINE, MODEL, make_engine, make_weights

DENSE = ModelConfig.model_validate(
    MODEL.model_dump() | {"first_k_dense_replace": MODEL.num_hidden_layers, "head_dim": 16}
)
FAST = EngineConfig.model_validate(
    ENGINE.model_dump() | {"deterministic": False, "compute": "fast", "num_threads": 2}
)

reason = native.why_not(DENSE, FAST)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(reason is not None, reason=f"no native step: {reason}"),
]


class TestNativeLightEngine(SwapContract, ThreadsContract, KVContract, StepsContract):
    def make_runtime(self) -> ModelRuntime:
        return make_engine(FAST, DENSE)

    def make_weights(self, version: int) -> WeightSet:
        return make_weights(version, DENSE, seed=version)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, LightEngine)
        runtime.close()
