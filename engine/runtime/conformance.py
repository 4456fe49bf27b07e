"""What every engine behind MRI must do, as tests: subclass ModelRuntimeContract and give it one.

    class TestMine(ModelRuntimeContract):
        def make_runtime(self): return MyEngine(...)

Needs pytest only to run. An engine keeps at least 64 tokens a context, samples reproducibly under a
DrawKey, and has weights loaded. What ``info()`` does not declare it must refuse with
NotSupportedError; that test is then skipped and says so, which is how the suite reports it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np
import pytest

from engine.errors import (
    CapacityError,
    ContextLost,
    EngineError,
    InvalidStateError,
    NotSupportedError,
)
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    StepRequest,
    StepResult,
)

PROMPT = [1, 2, 3, 1, 2, 3, 1]
POLICY = ContextPolicy(draw=DrawKey(run_seed=7, round=1, task=2, sample=3))


class Declined(Exception):
    """The engine does not have what the test is about, and said so."""


class TokenBytes(Protocol):
    """What an engine that reads text knows of its tokens (engine.chat.vocabulary)."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def bytes_of(self, token: int) -> bytes: ...


class ModelRuntimeContract:
    """One behaviour a test. ``slow_step`` must be a request that cannot end at once."""

    vocabulary: TokenBytes | None = None
    """The engine's, where it has one."""
    timeout_s = 60.0
    """Of one check."""

    # -- what an implementation gives -----------------------------------------------------------

    def make_runtime(self) -> ModelRuntime:
        """A fresh engine with weights; each test calls this once."""
        raise NotImplementedError("subclass ModelRuntimeContract and give it an engine")

    async def end_runtime(self, runtime: ModelRuntime) -> None:
        """Free what ``make_runtime`` took."""

    # -- steps ----------------------------------------------------------------------------------

    def test_step_adds_what_it_returns(self) -> None:
        """A step's tokens follow the context; the next step starts after them."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            first = await runtime.forward_step(StepRequest(ctx, 5))
            second = await runtime.forward_step(StepRequest(ctx, 2))
            assert (first.start, len(first.token_ids), first.finish) == (7, 5, "length")
            assert (second.start, len(second.token_ids)) == (12, 2)
            assert (await runtime.forward_step(StepRequest(ctx, 1))).start == 14

        self._run(check)

    def test_types_are_as_documented(self) -> None:
        """int32 ids in the vocabulary, float32 logprobs <= 0, the active weight version."""

        async def check(runtime: ModelRuntime) -> None:
            info = await runtime.info()
            ctx = await runtime.init_context(PROMPT, POLICY)
            result = await runtime.forward_step(StepRequest(ctx, 4))
            assert result.token_ids.dtype == np.int32 and result.logprobs.dtype == np.float32
            assert len(result.logprobs) == 4 and (result.logprobs <= 0).all()
            assert ((result.token_ids >= 0) & (result.token_ids < info.vocab_size)).all()
            assert result.weight_version == info.weight_version >= 0

        self._run(check)

    def test_stop_id_ends_the_step_and_is_its_last_token(self) -> None:
        """Generation ends after the first id in stop_ids."""

        async def check(runtime: ModelRuntime) -> None:
            free = await self._sample(runtime, 8)
            stop = int(free.token_ids[3])
            end = free.token_ids.tolist().index(stop) + 1
            ctx = await runtime.init_context(PROMPT, POLICY)
            result = await runtime.forward_step(StepRequest(ctx, 8, stop_ids=(stop,)))
            assert result.finish == "stop"
            np.testing.assert_array_equal(result.token_ids, free.token_ids[:end])

        self._run(check)

    def test_a_draw_depends_on_its_position_only(self) -> None:
        """One step of eight tokens = eight steps of one = again from a context rebuilt half-way."""

        async def check(runtime: ModelRuntime) -> None:
            whole = await self._sample(runtime, 8)
            ctx = await runtime.init_context(PROMPT, POLICY)
            steps = [await runtime.forward_step(StepRequest(ctx, 1)) for _ in range(8)]
            assert [int(step.token_ids[0]) for step in steps] == whole.token_ids.tolist()
            rebuilt = await runtime.init_context(PROMPT + whole.token_ids[:4].tolist(), POLICY)
            rest = await runtime.forward_step(StepRequest(rebuilt, 4))
            np.testing.assert_array_equal(rest.token_ids, whole.token_ids[4:])

        self._run(check)

    def test_a_context_that_is_full_ends_its_step(self) -> None:
        """max_context ends a step with "length"; the next one is a CapacityError."""

        async def check(runtime: ModelRuntime) -> None:
            limit = (await runtime.info()).max_context
            ctx = await runtime.init_context(PROMPT, POLICY)
            await runtime.append(ctx, [1] * (limit - len(PROMPT) - 2))
            result = await runtime.forward_step(StepRequest(ctx, 10))
            assert (len(result.token_ids), result.finish) == (2, "length")
            await self._raises(CapacityError, runtime.forward_step(StepRequest(ctx, 1)))

        self._run(check)

    # -- append, fork, release ------------------------------------------------------------------

    def test_appended_tokens_count_like_prompt_tokens(self) -> None:
        """init + append = init with all of it."""

        async def check(runtime: ModelRuntime) -> None:
            whole = await self._sample(runtime, 4)
            ctx = await runtime.init_context(PROMPT[:3], POLICY)
            await runtime.append(ctx, PROMPT[3:])
            parts = await runtime.forward_step(StepRequest(ctx, 4))
            np.testing.assert_array_equal(parts.token_ids, whole.token_ids)

        self._run(check)

    def test_forks_are_independent(self) -> None:
        """A child has the parent's tokens and its own draws; neither sees the other's later ones;
        several forks of one parent may be asked for at once."""

        async def check(runtime: ModelRuntime) -> None:
            whole = await self._sample(runtime, 4)
            parent = await runtime.init_context(PROMPT, ContextPolicy())
            others = [ContextPolicy(draw=DrawKey(7, 1, 2, sample)) for sample in (3, 4, 5)]
            children = await asyncio.gather(*(runtime.fork(parent, p) for p in others))
            await runtime.append(parent, [2, 2])
            results = await asyncio.gather(
                *(runtime.forward_step(StepRequest(child, 4)) for child in children)
            )
            np.testing.assert_array_equal(results[0].token_ids, whole.token_ids)
            own = await runtime.forward_step(StepRequest(parent, 1))
            assert own.start == len(PROMPT) + 2
            assert all(result.start == len(PROMPT) for result in results)

        self._run(check)

    def test_released_contexts_are_gone(self) -> None:
        """Every verb answers ContextLost, release itself is a no-op."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            await runtime.release(ctx)
            await runtime.release(ctx)
            await runtime.cancel(ctx)
            await self._raises(ContextLost, runtime.forward_step(StepRequest(ctx, 1)))
            await self._raises(ContextLost, runtime.fork(ctx))
            await self._raises(
                ContextLost, runtime.forward_step(StepRequest(ContextId("never opened"), 1))
            )

        self._run(check)

    def test_release_gives_everything_back(self) -> None:
        """After the last release the engine holds no context and no KV."""

        async def check(runtime: ModelRuntime) -> None:
            contexts = [await runtime.init_context(PROMPT, POLICY) for _ in range(3)]
            contexts.append(await runtime.fork(contexts[0]))
            await asyncio.gather(*(runtime.forward_step(StepRequest(c, 3)) for c in contexts))
            assert (await runtime.info()).num_contexts == 4
            for ctx in contexts:
                await runtime.release(ctx)
            info = await runtime.info()
            assert (info.num_contexts, info.kv_bytes_used) == (0, 0)

        self._run(check)

    # -- states ---------------------------------------------------------------------------------

    def test_calls_for_one_context_must_not_overlap(self) -> None:
        """A second step, append or fork during a step is an InvalidStateError; the step lives."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            running = asyncio.ensure_future(runtime.forward_step(self._slow_step(ctx)))
            await asyncio.sleep(0)
            await self._raises(InvalidStateError, runtime.forward_step(StepRequest(ctx, 1)))
            await self._raises(InvalidStateError, runtime.fork(ctx))
            await runtime.cancel(ctx)
            assert (await running).finish in ("cancelled", "length")

        self._run(check)

    def test_cancel_ends_a_step_and_keeps_its_tokens(self) -> None:
        """finish="cancelled"; what was sampled is in the context, which goes on from there."""

        async def check(runtime: ModelRuntime) -> None:
            whole = await self._sample(runtime, 32)
            ctx = await runtime.init_context(PROMPT, POLICY)
            running = asyncio.ensure_future(runtime.forward_step(self._slow_step(ctx)))
            await asyncio.sleep(0)
            await runtime.cancel(ctx)
            first = await running
            assert first.finish in ("cancelled", "length")
            tokens = first.token_ids.tolist()
            if first.finish == "cancelled" and len(tokens) < 28:
                tokens += (await runtime.forward_step(StepRequest(ctx, 4))).token_ids.tolist()
            assert tokens[:32] == whole.token_ids[: len(tokens)].tolist()

        self._run(check)

    def test_nonsense_is_refused(self) -> None:
        """Empty prompts, ids outside the vocabulary, no tokens to make: EngineError."""

        async def check(runtime: ModelRuntime) -> None:
            info = await runtime.info()
            await self._raises(EngineError, runtime.init_context([], POLICY))
            await self._raises(EngineError, runtime.init_context([info.vocab_size], POLICY))
            await self._raises(
                EngineError, runtime.init_context([1] * (2 + info.max_context), POLICY)
            )
            ctx = await runtime.init_context(PROMPT, POLICY)
            await self._raises(EngineError, runtime.forward_step(StepRequest(ctx, 0)))
            await runtime.forward_step(StepRequest(ctx, 1))

        self._run(check)

    # -- capabilities ---------------------------------------------------------------------------

    def test_expert_reports_have_no_gap(self) -> None:
        """All reports of a context together cover positions 0 .. len - 2, also of a fork."""

        async def check(runtime: ModelRuntime) -> None:
            if "experts" not in (await runtime.info()).capabilities:
                assert (await self._sample(runtime, 1)).experts is None
                raise Declined("does not report routed experts")
            parent = await runtime.init_context(PROMPT, POLICY)
            for ctx in (parent, await runtime.fork(parent)):
                reports = [await runtime.forward_step(StepRequest(ctx, 3))]
                await runtime.append(ctx, [2, 3, 2])
                reports.append(await runtime.forward_step(StepRequest(ctx, 2)))
                end = 0
                for report in reports:
                    assert report.experts is not None and report.experts.dtype == np.int16
                    assert report.experts_start == end
                    end += len(report.experts)
                assert end == len(PROMPT) + 8 - 1

        self._run(check)

    # -- helpers --------------------------------------------------------------------------------

    def _run(self, check: Any) -> None:
        async def main() -> None:
            runtime = self.make_runtime()
            assert isinstance(runtime, ModelRuntime)
            try:
                await asyncio.wait_for(check(runtime), timeout=self.timeout_s)
            finally:
                await self.end_runtime(runtime)

        try:
            asyncio.run(main())
        except Declined as declined:
            pytest.skip(f"the engine {declined}")

    async def _needs(
        self, runtime: ModelRuntime, capability: str, call: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        """Go on where the engine has it; one that has not must refuse ``call``."""
        if capability not in (await runtime.info()).capabilities:
            await self._raises(NotSupportedError, call())
            raise Declined(f"declines {capability!r} with NotSupportedError, as info() says")

    async def _sample(self, runtime: ModelRuntime, num_tokens: int) -> StepResult:
        ctx = await runtime.init_context(PROMPT, POLICY)
        result = await runtime.forward_step(StepRequest(ctx, num_tokens))
        await runtime.release(ctx)
        return result

    def _slow_step(self, ctx: ContextId) -> StepRequest:
        """Fills the context, which takes many turns of the event loop."""
        return StepRequest(ctx, 1_000_000)

    async def _raises(self, kind: type[Exception], call: Coroutine[Any, Any, Any]) -> None:
        try:
            await call
        except kind as error:
            assert "\n" not in str(error).strip(), f"not a one-line message: {error}"
            return
        raise AssertionError(f"expected {kind.__name__}, the call returned")
