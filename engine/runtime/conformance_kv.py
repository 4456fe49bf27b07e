"""More of the MRI contract: when the KV may be looked at, what an eviction does, long prompts."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np

from engine.errors import ContextLost, InvalidStateError
from engine.runtime.chunks import init_in_chunks
from engine.runtime.conformance import POLICY, PROMPT, ModelRuntimeContract
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import EvictSelector, StepRequest


class KVContract(ModelRuntimeContract):
    """``evict_kv``, ``get_kv_summary`` and ``init_in_chunks``."""

    def test_kv_summary_only_after_init_or_evict(self) -> None:
        """During a step, and from a step until the next eviction, it is an InvalidStateError."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            await self._needs(runtime, "kv_summary", lambda: runtime.get_kv_summary(ctx))
            assert (await runtime.get_kv_summary(ctx)).num_tokens == len(PROMPT)
            await runtime.append(ctx, [1, 2])
            assert (await runtime.get_kv_summary(ctx)).num_tokens == len(PROMPT) + 2
            running = asyncio.ensure_future(runtime.forward_step(self._slow_step(ctx)))
            await asyncio.sleep(0)
            await self._raises(InvalidStateError, runtime.get_kv_summary(ctx))
            await runtime.cancel(ctx)
            length = len(PROMPT) + 2 + len((await running).token_ids)
            await self._raises(InvalidStateError, runtime.get_kv_summary(ctx))
            child = await runtime.fork(ctx)
            assert (await runtime.get_kv_summary(child)).num_tokens == length
            if "evict" in (await runtime.info()).capabilities:
                await runtime.evict_kv(ctx, EvictSelector(0, 0))
                assert (await runtime.get_kv_summary(ctx)).num_tokens == length
            await runtime.release(ctx)
            await self._raises(ContextLost, runtime.get_kv_summary(ctx))

        self._run(check)

    def test_evicted_kv_does_not_change_the_policy(self) -> None:
        """What was evicted is computed again, the tokens are the same."""

        async def check(runtime: ModelRuntime) -> None:
            whole = await self._sample(runtime, 8)
            ctx = await runtime.init_context(PROMPT, POLICY)
            await self._needs(runtime, "evict", lambda: runtime.evict_kv(ctx, EvictSelector(0, 3)))
            await runtime.forward_step(StepRequest(ctx, 4))
            held = await runtime.info()
            result = await runtime.evict_kv(ctx, EvictSelector(0, 3))
            assert result.confirmed and result.evicted[0][0] == 0 and result.freed_bytes > 0
            assert (await runtime.info()).kv_bytes_used < held.kv_bytes_used
            rest = await runtime.forward_step(StepRequest(ctx, 4))
            np.testing.assert_array_equal(rest.token_ids, whole.token_ids[4:])

        self._run(check)

    def test_evictions_take_whole_blocks(self) -> None:
        """One token in the middle takes its block, or more; then there is nothing left to take."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT * 6, POLICY)
            selector = EvictSelector(5, 6)
            await self._needs(runtime, "evict", lambda: runtime.evict_kv(ctx, selector))
            await runtime.forward_step(StepRequest(ctx, 4))
            first = await runtime.evict_kv(ctx, selector)
            spans = sorted(first.evicted)
            assert any(start <= 5 and end >= 6 for start, end in spans)
            assert all(left[1] <= right[0] for left, right in pairwise(spans))
            again = await runtime.evict_kv(ctx, selector)
            assert (again.evicted, again.freed_bytes) == ((), 0)
            length = len(PROMPT) * 6 + 4
            for bad in (EvictSelector(3, 2), EvictSelector(0, length + 1), EvictSelector(-1, 2)):
                await self._raises(InvalidStateError, runtime.evict_kv(ctx, bad))

        self._run(check)

    def test_a_prompt_in_chunks_is_the_prompt(self) -> None:
        """Chunk by chunk, the context samples what it samples when opened at once."""

        async def check(runtime: ModelRuntime) -> None:
            prompt = PROMPT * 6
            whole = await runtime.init_context(prompt, POLICY)
            expected = await runtime.forward_step(StepRequest(whole, 4))
            chunked = await init_in_chunks(runtime, prompt, POLICY, chunk_tokens=10)
            assert chunked.attempts == (1,) * 5 and not chunked.approximate
            result = await runtime.forward_step(StepRequest(chunked.ctx, 4))
            assert result.start == len(prompt)
            np.testing.assert_array_equal(result.token_ids, expected.token_ids)

        self._run(check)

    def test_independent_chunks_say_that_they_are_approximate(self) -> None:
        """One context a chunk, each of its own tokens; asking for the one context is refused."""

        async def check(runtime: ModelRuntime) -> None:
            chunked = await init_in_chunks(
                runtime, PROMPT * 3, POLICY, chunk_tokens=7, independent_chunks=True
            )
            assert chunked.approximate and len(set(chunked.contexts)) == 3
            alone = await self._sample(runtime, 2)
            for ctx in chunked.contexts:
                result = await runtime.forward_step(StepRequest(ctx, 2))
                np.testing.assert_array_equal(result.token_ids, alone.token_ids)
            try:
                raise AssertionError(f"expected InvalidStateError, got {chunked.ctx}")
            except InvalidStateError:
                pass

        self._run(check)
