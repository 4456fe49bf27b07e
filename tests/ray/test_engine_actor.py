"""EngineActor and RemoteRuntime: MRI across processes, and what callers of a killed engine see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from engine.actors import RemoteRuntime, start_engine
from engine.errors import ContextLost, EngineError, InvalidStateError, WeightsError
from engine.runtime.conformance_kv import KVContract
from engine.runtime.conformance_steps import StepsContract
from engine.runtime.protocol import ModelRuntime, Streaming
from engine.runtime.types import (
    ContextPolicy,
    DrawKey,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)
from infra.cluster.connect import ClusterHandle
from tests.engine.tiny import ENGINE, MODEL, make_engine, make_weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]
POLICY = ContextPolicy(draw=DrawKey(5, sample=1))
PROMPT = [1, 2, 3]


class ReadWeights:
    """What is published at a path, like a weight store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> WeightSet:
        return pickle.loads(self._path.read_bytes())


class WritePid:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, pid: int) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(str(pid))
        temporary.rename(self._path)


class Served:
    """A running actor with its weights file and pid file."""

    def __init__(self, folder: Path) -> None:
        self._weights, self._pid = folder / "weights", folder / "pid"
        self.publish(make_weights(1))
        self.actor: Any = start_engine(
            MODEL,
            ENGINE,
            name=f"engine-{uuid.uuid4().hex[:8]}",
            num_cpus=0,
            fetch_weights=ReadWeights(self._weights),
            announce=WritePid(self._pid),
        )
        ray.get(self.actor.ping.remote(), timeout=60)

    def publish(self, weights: WeightSet) -> None:
        self._weights.write_bytes(pickle.dumps(weights))

    @property
    def pid(self) -> int:
        return int(self._pid.read_text())


@pytest.fixture(scope="module")
def served(cluster: ClusterHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("engine"))
    yield served
    ray.kill(served.actor)


class TestRemoteRuntime(KVContract, StepsContract):
    """The same contract as an engine in this process."""

    @pytest.fixture(autouse=True)
    def _use(self, served: Served) -> None:
        self.served = served

    def make_runtime(self) -> ModelRuntime:
        # one name: each client frees what the one before it left
        return RemoteRuntime(self.served.actor, "contract")


def test_same_bits_as_in_process(served: Served):
    """Tokens, logprobs and experts cross unchanged."""

    async def one(runtime: ModelRuntime):
        ctx = await runtime.init_context(PROMPT, POLICY)
        await runtime.append(ctx, [4, 5])
        result = await runtime.forward_step(StepRequest(ctx, 8))
        await runtime.release(ctx)
        return result

    engine = make_engine()
    try:
        here = asyncio.run(one(engine))
    finally:
        engine.close()
    there = asyncio.run(one(RemoteRuntime(served.actor)))
    np.testing.assert_array_equal(here.token_ids, there.token_ids)
    np.testing.assert_array_equal(here.logprobs, there.logprobs)
    assert here.experts is not None and there.experts is not None
    np.testing.assert_array_equal(here.experts, there.experts)


def test_streams_cross(served: Served):
    """Deltas add up to the result, which is that of forward_step; beside a caller that does not
    stream, both over one client."""

    async def check() -> None:
        runtime = RemoteRuntime(served.actor)
        assert isinstance(runtime, Streaming)
        first, second = [await runtime.init_context(PROMPT, POLICY) for _ in range(2)]
        await runtime.append(first, [4, 5])
        await runtime.append(second, [4, 5])
        whole = asyncio.create_task(runtime.forward_step(StepRequest(first, 30, num_logprobs=2)))
        deltas: list[StepDelta] = []
        result: StepResult | None = None
        async for part in runtime.stream_step(StepRequest(second, 30, num_logprobs=2)):
            assert result is None
            if isinstance(part, StepResult):
                result = part
            else:
                deltas.append(part)
        assert result is not None
        expected = await whole
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
            told = np.concatenate([getattr(delta, name) for delta in deltas])
            np.testing.assert_array_equal(told, getattr(result, name))
            np.testing.assert_array_equal(told, getattr(expected, name))
        for ctx in (first, second):
            await runtime.release(ctx)

    asyncio.run(check())


def test_a_closed_stream_ends_its_step_in_the_engine(served: Served):
    """The next call for the context finds it idle; a typed error comes out of a stream as it is."""

    async def check() -> None:
        runtime = RemoteRuntime(served.actor)
        ctx = await runtime.init_context(PROMPT, POLICY)
        async with contextlib.aclosing(runtime.stream_step(StepRequest(ctx, 150))) as stream:
            assert isinstance(await anext(stream), StepDelta)
        rest = await runtime.forward_step(StepRequest(ctx, 1))
        assert rest.start < len(PROMPT) + 150
        with pytest.raises(InvalidStateError, match="max_new_tokens=0"):
            async for _ in runtime.stream_step(StepRequest(ctx, 0)):
                pass
        await runtime.release(ctx)

    asyncio.run(check())


def test_typed_errors_cross_as_one_line(served: Served):
    """A corrupt set is the engine's own WeightsError, not a traceback of Ray's."""
    weights = make_weights(2)
    weights.tensors["lm_head"] = weights.tensors["lm_head"] + 1
    with pytest.raises(WeightsError, match="lm_head does not match its sha256") as caught:
        asyncio.run(RemoteRuntime(served.actor).load_weights(weights))
    assert "\n" not in str(caught.value)


def test_a_bug_behind_a_call_is_told_to_its_caller(served: Served):
    """An argument the shell does not expect is an EngineError; the engine goes on."""

    async def check() -> None:
        runtime = RemoteRuntime(served.actor, timeout_s=20)
        with pytest.raises(EngineError, match="step: AttributeError"):
            await runtime._ask("step", [1], "no request")
        assert (await runtime.info()).weight_version == 1

    asyncio.run(check())


def test_a_call_has_a_deadline(served: Served):
    """A stopped process neither dies nor answers: the error says who waited for what."""

    async def check() -> None:
        runtime = RemoteRuntime(served.actor, "runner-7", timeout_s=1.0)
        assert (await runtime.info()).num_contexts >= 0
        os.kill(served.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="info: client runner-7 waited 1 s"):
                await runtime.info()
        finally:
            os.kill(served.pid, signal.SIGCONT)

    asyncio.run(check())


def test_a_cancelled_caller_leaves_nothing_in_the_engine(served: Served):
    """Its step ends, a context that it never got is released."""

    async def check() -> None:
        runtime = RemoteRuntime(served.actor, "contract")
        ctx = await runtime.init_context(PROMPT, POLICY)
        before = (await runtime.info()).num_contexts
        step = asyncio.ensure_future(runtime.forward_step(StepRequest(ctx, 1000)))
        opening = asyncio.ensure_future(runtime.init_context(PROMPT, POLICY))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        step.cancel()
        opening.cancel()
        await asyncio.gather(step, opening, return_exceptions=True)
        deadline = time.monotonic() + 20
        while (await runtime.info()).num_contexts != before:
            assert time.monotonic() < deadline, "the context of a cancelled call stays open"
            await asyncio.sleep(0.05)
        await runtime.append(ctx, [1])
        await runtime.release(ctx)

    asyncio.run(check())


def test_a_killed_engine_loses_contexts_and_serves_the_newest_weights(served: Served):
    """kill -9 under running steps: every caller gets ContextLost, once the restarted engine serves
    what was published meanwhile; never the random weights a model starts with."""

    async def check() -> None:
        runtime = RemoteRuntime(served.actor, "contract", recovery_s=60)
        contexts = [await runtime.init_context(PROMPT, POLICY) for _ in range(3)]
        steps = [
            asyncio.ensure_future(runtime.forward_step(StepRequest(ctx, 1000))) for ctx in contexts
        ]
        await asyncio.sleep(0.01)
        newest = make_weights(7, seed=3)
        served.publish(newest)
        killed = served.pid
        os.kill(killed, signal.SIGKILL)
        for step in steps:
            with pytest.raises(ContextLost, match="rebuild"):
                await step
        info = await runtime.info()
        assert (info.weight_version, info.num_contexts) == (7, 0)
        assert info.weight_checksum == newest.manifest.checksum
        assert served.pid != killed
        with pytest.raises(ContextLost, match="unknown"):
            await runtime.forward_step(StepRequest(contexts[0], 1))
        ctx = await runtime.init_context(PROMPT, POLICY)
        result = await runtime.forward_step(StepRequest(ctx, 4))
        assert result.weight_version == 7
        await runtime.release(ctx)

    asyncio.run(check())
