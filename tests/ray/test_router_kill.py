"""kill -9 of an engine actor behind the batch router, under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
import ray

from engine.actors import RemoteRuntime
from engine.errors import ContextLost
from engine.light.routed import RoutedRuntime
from engine.light.waiting_room import RouterConfig
from engine.runtime.types import ContextPolicy, Sampling, StepDelta, StepRequest, StepResult
from infra.cluster.connect import ClusterHandle
from tests.engine.tiny import make_engine, make_weights
from tests.ray.test_engine_actor import PROMPT, Served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
CLIENTS, PLACES, TOKENS = 12, 4, 100


@pytest.fixture(scope="module")
def served(cluster: ClusterHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("router"))
    yield served
    ray.kill(served.actor)


def test_a_kill_under_load_is_a_typed_error_and_the_pool_recovers(served: Served) -> None:
    """12 clients on 4 places. Those in flight get ContextLost, whatever they had streamed; all
    ask again and are served by the newest weights, to the token; no place stays taken."""
    newest = make_weights(9, seed=4)

    async def check() -> None:
        remote = RemoteRuntime(served.actor, "router", recovery_s=120)
        router = RoutedRuntime(
            remote,
            RouterConfig(max_running=PLACES, waiting_factor=CLIENTS),
            kv_bytes=lambda n: n,
            kv_bytes_total=10**6,
        )
        begun = asyncio.Event()

        async def client() -> tuple[int, StepResult]:
            """Times that it was told of a lost context, and its answer."""
            lost = 0
            while True:
                try:
                    ctx = await router.init_context(PROMPT, ContextPolicy())
                    result = await _stream(router, ctx, begun)
                    await router.release(ctx)
                    return lost, result
                except ContextLost as error:
                    assert "rebuild" in str(error)
                    lost += 1

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        await begun.wait()
        served.publish(newest)
        killed = served.pid
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(400):
            found = await asyncio.gather(*clients)
        assert served.pid != killed
        assert sum(lost for lost, _ in found) >= PLACES, "those that ran were told"
        after = [result for lost, result in found if lost]
        assert {result.weight_version for result in after} == {9}
        tokens = {tuple(result.token_ids.tolist()) for result in after}
        assert tokens == {await _alone(newest)}
        state = router.state()
        assert (state.waiting, state.running) == (0, 0)
        info = await router.info()
        assert (info.weight_version, info.weight_checksum) == (9, newest.manifest.checksum)

    asyncio.run(check())


async def _stream(router: RoutedRuntime, ctx: Any, begun: asyncio.Event) -> StepResult:
    request = StepRequest(ctx, TOKENS, Sampling(temperature=0.0))
    stream: Any = router.stream_step(request)
    async with aclosing(stream):
        async for part in stream:
            if isinstance(part, StepDelta):
                begun.set()
            else:
                return part
    raise AssertionError("a stream ends with its result")


async def _alone(weights: Any) -> tuple[int, ...]:
    """What a quiet engine with these weights answers."""
    engine = make_engine()
    try:
        await engine.load_weights(weights)
        ctx = await engine.init_context(PROMPT, ContextPolicy())
        result = await engine.forward_step(StepRequest(ctx, TOKENS, Sampling(temperature=0.0)))
        return tuple(result.token_ids.tolist())
    finally:
        engine.close()
