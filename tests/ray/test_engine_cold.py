"""Cold KV across processes: RemoteRuntime sends blocks away, fetches them, and routes turns."""

from __future__ import annotations

import asyncio
import pickle
import uuid

import numpy as np
import pytest
import ray

from engine.actors import RemoteRuntime, start_engine
from engine.bench.kv_recall import library, model_config, recall_weights, small_attention
from engine.config import EngineConfig
from engine.kvcache.config import ColdRouterConfig, TierConfig
from engine.runtime.protocol import Rewarming
from engine.runtime.types import ContextPolicy, EvictSelector, Sampling, StepRequest, WeightSet
from infra.cluster.connect import ClusterHandle

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]
TEXT = library(400, [100, 200])
MODEL = model_config(len(TEXT.names), 512, **small_attention())


class Stored:
    """Weights by value, as a store would give them."""

    def __init__(self, weights: WeightSet) -> None:
        self._bytes = pickle.dumps(weights)

    def __call__(self) -> WeightSet:
        return pickle.loads(self._bytes)


def test_cold_blocks_across_processes(cluster: ClusterHandle):
    """A fact is stated, not stated while its block is cold, stated again after rewarm_kv to the
    same bits; and a question fetches another one by itself."""
    config = EngineConfig(
        max_context=500,
        num_blocks=64,
        num_warm_blocks=64,
        tiers=TierConfig(warm=1024),
        cold_router=ColdRouterConfig(encoder="none", budget=2, question_tokens=1),
    )
    actor = start_engine(
        MODEL,
        config,
        name=f"engine-{uuid.uuid4().hex[:8]}",
        num_cpus=0,
        fetch_weights=Stored(recall_weights(MODEL)),
        text_of=TEXT.text,
    )
    runtime = RemoteRuntime(actor)
    assert isinstance(runtime, Rewarming)
    fact, other = TEXT.facts

    async def check() -> None:
        ctx = await runtime.init_context(TEXT.token_ids, ContextPolicy())

        async def say(key: int):
            child = await runtime.fork(ctx)
            await runtime.append(child, [key])
            result = await runtime.forward_step(
                StepRequest(child, 9, Sampling(temperature=0), (TEXT.end,))
            )
            await runtime.release(child)
            return result

        first = await say(fact.key)
        gone = await runtime.evict_kv(ctx, EvictSelector(32, 256, to="cold"))
        assert len(gone.evicted) == 7 and gone.freed_bytes > 0
        assert (await runtime.get_kv_summary(ctx)).num_cold == 224
        assert tuple((await say(other.key)).token_ids.tolist()) == other.answer
        # a word that is nowhere brings nothing back
        lost = await say(TEXT.names.index("900"))
        assert TEXT.end not in lost.token_ids.tolist()
        back = await runtime.rewarm_kv(ctx, EvictSelector(96, 128))
        assert back.loaded == ((96, 128),)
        second = await say(fact.key)
        assert tuple(second.token_ids.tolist()) == fact.answer
        np.testing.assert_array_equal(first.logprobs, second.logprobs)

    try:
        asyncio.run(asyncio.wait_for(check(), 150))
    finally:
        ray.kill(actor)
