"""More of the MRI contract, for engines that compute: weight swaps, and callers on many threads.

class TestMine(SwapContract, ThreadsContract):
    def make_runtime(self): return MyEngine(...)   # serves make_weights(1)
    def make_weights(self, version): return ...    # other tensors for every version
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.errors import WeightsError
from engine.runtime.conformance import POLICY, PROMPT, ModelRuntimeContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextPolicy, DrawKey, EvictSelector, StepRequest, WeightSet
from engine.runtime.weights import make_weight_set

NUM_THREADS = 8


class SwapContract(ModelRuntimeContract):
    """``load_weights`` verifies, then swaps for everybody at once."""

    def make_weights(self, version: int) -> WeightSet:
        raise NotImplementedError("give weight sets that fit the engine, other ones each version")

    def test_bad_weights_change_nothing(self) -> None:
        """A flipped number, another shape or NaN is a WeightsError; the old weights go on."""

        async def check(runtime: ModelRuntime) -> None:
            before = await runtime.info()
            whole = await self._sample(runtime, 4)
            for bad in self._bad_sets():
                await self._raises(WeightsError, runtime.load_weights(bad))
            after = await runtime.info()
            assert (after.weight_version, after.weight_checksum) == (
                before.weight_version,
                before.weight_checksum,
            )
            again = await self._sample(runtime, 4)
            np.testing.assert_array_equal(again.token_ids, whole.token_ids)
            np.testing.assert_array_equal(again.logprobs, whole.logprobs)

        self._run(check)

    def test_live_contexts_go_on_under_new_weights(self) -> None:
        """After a swap nothing computed under the old weights is used: a context that lived through
        it samples what one made after it samples."""

        async def check(runtime: ModelRuntime) -> None:
            old = await runtime.init_context(PROMPT, POLICY)
            first = await runtime.forward_step(StepRequest(old, 3))
            weights = self.make_weights(2)
            assert await runtime.load_weights(weights) == 2
            info = await runtime.info()
            assert (info.weight_version, info.weight_checksum) == (2, weights.manifest.checksum)
            rest = await runtime.forward_step(StepRequest(old, 4))
            new = await runtime.init_context([*PROMPT, *first.token_ids.tolist()], POLICY)
            fresh = await runtime.forward_step(StepRequest(new, 4))
            assert rest.weight_version == fresh.weight_version == 2
            np.testing.assert_array_equal(rest.token_ids, fresh.token_ids)
            np.testing.assert_allclose(rest.logprobs, fresh.logprobs, atol=1e-5)

        self._run(check)

    def _bad_sets(self) -> list[WeightSet]:
        good = self.make_weights(2)
        name = max(good.tensors, key=lambda key: good.tensors[key].size)
        tensor = good.tensors[name]
        flipped = {**good.tensors, name: -tensor}
        wide = {**good.tensors, name: np.concatenate([tensor, tensor])}
        sick = {**good.tensors, name: np.full_like(tensor, np.nan)}
        config = good.manifest.model_config
        return [
            WeightSet(good.manifest, flipped),
            make_weight_set(2, wide, config),
            make_weight_set(2, sick, config),
        ]


class ThreadsContract(ModelRuntimeContract):
    """For engines whose calls may come from any thread and event loop."""

    def test_threads_that_step_and_evict(self) -> None:
        """Eight threads, each with an event loop, step and evict contexts of their own: each
        samples what it samples alone, and nothing is left behind."""

        async def episode(runtime: ModelRuntime, sample: int) -> list[int]:
            can_evict = "evict" in (await runtime.info()).capabilities
            policy = ContextPolicy(draw=DrawKey(7, sample=sample))
            ctx = await runtime.init_context(PROMPT, policy)
            tokens: list[int] = []
            for turn in range(4):
                result = await runtime.forward_step(StepRequest(ctx, 3))
                tokens += result.token_ids.tolist()
                if can_evict:
                    await runtime.evict_kv(ctx, EvictSelector(turn, turn + 2))
                child = await runtime.fork(ctx)
                await runtime.release(ctx if turn % 2 else child)
                ctx = child if turn % 2 else ctx
            await runtime.release(ctx)
            return tokens

        async def check(runtime: ModelRuntime) -> None:
            alone = [await episode(runtime, sample) for sample in range(NUM_THREADS)]
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                together = await asyncio.gather(
                    *(
                        loop.run_in_executor(pool, asyncio.run, episode(runtime, sample))
                        for sample in range(NUM_THREADS)
                    )
                )
            assert list(together) == alone
            info = await runtime.info()
            assert (info.num_contexts, info.kv_bytes_used) == (0, 0)

        self._run(check)
