"""MRI over HTTP, against a real uvicorn in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.adapters.http import HttpRuntime
from engine.runtime.conformance_kv import KVContract
from engine.runtime.conformance_steps import StepsContract
from engine.runtime.conformance_swaps import SwapContract, ThreadsContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import WeightSet
from tests.contracts.mri_server import ServerProcess
from tests.engine.tiny import make_weights


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    server = ServerProcess("light")
    yield server
    server.close()


@pytest.fixture(scope="module")
def scripted() -> Iterator[ServerProcess]:
    server = ServerProcess("scripted")
    yield server
    server.close()


@pytest.mark.slow
class TestHttpRuntime(SwapContract, ThreadsContract, KVContract, StepsContract):
    """The same contract as an engine in this process; weights of version 1 for each test."""

    @pytest.fixture(autouse=True)
    def _use(self, served: ServerProcess) -> None:
        self.served = served

    def make_runtime(self) -> ModelRuntime:
        runtime = HttpRuntime(self.served.url)
        return runtime

    def make_weights(self, version: int) -> WeightSet:
        return make_weights(version, seed=version - 1)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, HttpRuntime)
        await runtime.aclose()


class TestScriptedOverHttp(KVContract, StepsContract):
    """An engine without weights or evictions of its own kind."""

    @pytest.fixture(autouse=True)
    def _use(self, scripted: ServerProcess) -> None:
        self.served = scripted

    def make_runtime(self) -> ModelRuntime:
        return HttpRuntime(self.served.url)

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        assert isinstance(runtime, HttpRuntime)
        await runtime.aclose()
