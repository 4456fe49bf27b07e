"""More of the MRI contract: streams, stop texts, deadlines, sampling beyond the temperature."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np

from engine.errors import DeadlineExceeded, InvalidStateError
from engine.runtime.conformance import POLICY, PROMPT, Declined, ModelRuntimeContract
from engine.runtime.protocol import ModelRuntime, Streaming
from engine.runtime.types import (
    Constraint,
    ContextPolicy,
    Sampling,
    StepDelta,
    StepRequest,
    StepResult,
)

GREEDY = Sampling(temperature=0.0)


class StepsContract(ModelRuntimeContract):
    """What a StepRequest may ask for."""

    def test_a_stream_is_the_step(self) -> None:
        """Deltas in order, then the result, whose tokens and logprobs are theirs."""

        async def check(runtime: ModelRuntime) -> None:
            stream = await self._streaming(runtime)
            whole = await self._sample(runtime, 8)
            ctx = await runtime.init_context(PROMPT, POLICY)
            items = [item async for item in stream.stream_step(StepRequest(ctx, 8))]
            *deltas, result = items
            assert isinstance(result, StepResult) and result.finish == "length"
            parts = [delta for delta in deltas if isinstance(delta, StepDelta)]
            assert len(parts) == len(deltas) > 1
            np.testing.assert_array_equal(
                np.concatenate([part.token_ids for part in parts]), result.token_ids
            )
            np.testing.assert_array_equal(
                np.concatenate([part.logprobs for part in parts]), result.logprobs
            )
            np.testing.assert_array_equal(result.token_ids, whole.token_ids)
            assert (await runtime.forward_step(StepRequest(ctx, 1))).start == len(PROMPT) + 8

        self._run(check)

    def test_leaving_a_stream_cancels_the_step(self) -> None:
        """The context is idle soon after, and holds at least what was read."""

        async def check(runtime: ModelRuntime) -> None:
            stream = await self._streaming(runtime)
            ctx = await runtime.init_context(PROMPT, POLICY)
            items: Any = stream.stream_step(self._slow_step(ctx))
            async with aclosing(items):
                first = await anext(items)
            assert isinstance(first, StepDelta)
            limit = (await runtime.info()).max_context
            for _ in range(200):
                try:
                    child = await runtime.fork(ctx)
                    break
                except InvalidStateError:
                    await asyncio.sleep(0.02)
            else:
                raise AssertionError("the step that nobody reads still runs after 4 s")
            if limit - len(PROMPT) > 300:
                # long enough that it cannot have ended by itself
                result = await runtime.forward_step(StepRequest(child, 1))
                assert len(PROMPT) + len(first.token_ids) <= result.start < limit - 1

        self._run(check)

    def test_a_refused_stream_raises_the_step_s_error(self) -> None:
        """Typed, before the first item."""

        async def check(runtime: ModelRuntime) -> None:
            stream = await self._streaming(runtime)
            ctx = await runtime.init_context(PROMPT, POLICY)
            await self._raises(InvalidStateError, _drain(stream.stream_step(StepRequest(ctx, 0))))
            assert (await runtime.forward_step(StepRequest(ctx, 1))).start == len(PROMPT)

        self._run(check)

    def test_greedy_is_the_likeliest_token(self) -> None:
        """Temperature 0: the same tokens each time, logprob 0, and the first alternative."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, ContextPolicy())
            other = await runtime.fork(ctx)
            first = await runtime.forward_step(StepRequest(ctx, 6, GREEDY))
            again = await runtime.forward_step(StepRequest(other, 6, GREEDY))
            np.testing.assert_array_equal(first.token_ids, again.token_ids)
            if "sampling" in (await runtime.info()).capabilities:
                assert not first.logprobs.any()

        self._run(check)

    def test_a_seed_names_the_draws(self) -> None:
        """Without a draw key: the seed and the position alone decide."""

        async def check(runtime: ModelRuntime) -> None:
            seeded = Sampling(seed=11)
            ctx = await runtime.init_context(PROMPT, ContextPolicy())
            await self._needs(
                runtime, "sampling", lambda: runtime.forward_step(StepRequest(ctx, 1, seeded))
            )
            other = await runtime.fork(ctx)
            whole = await runtime.forward_step(StepRequest(ctx, 6, seeded))
            steps = [await runtime.forward_step(StepRequest(other, 2, seeded)) for _ in range(3)]
            tokens = np.concatenate([step.token_ids for step in steps])
            np.testing.assert_array_equal(tokens, whole.token_ids)

        self._run(check)

    def test_a_bias_chooses(self) -> None:
        """A large bias on one token makes it certain, also beside penalties and truncation."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            biased = Sampling(
                top_k=5, top_p=0.9, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5,
                repetition_penalty=1.1, logit_bias=((9, 500.0),),
            )  # fmt: skip
            await self._needs(
                runtime, "sampling", lambda: runtime.forward_step(StepRequest(ctx, 1, biased))
            )
            result = await runtime.forward_step(StepRequest(ctx, 3, biased))
            assert result.token_ids.tolist() == [9, 9, 9]
            np.testing.assert_allclose(result.logprobs, 0, atol=1e-6)

        self._run(check)

    def test_alternatives_hold_the_sampled_distribution(self) -> None:
        """The likeliest k, likeliest first; the sampled token has its own logprob among them."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            request = StepRequest(ctx, 4, num_logprobs=5)
            await self._needs(runtime, "sampling", lambda: runtime.forward_step(request))
            result = await runtime.forward_step(request)
            ids, logprobs = result.top_ids, result.top_logprobs
            assert ids is not None and logprobs is not None
            assert ids.shape == logprobs.shape == (4, 5)
            assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
            assert (np.diff(logprobs, axis=1) <= 0).all()
            for row, token in enumerate(result.token_ids):
                at = np.flatnonzero(ids[row] == token)
                if len(at):
                    np.testing.assert_allclose(
                        logprobs[row, at[0]], result.logprobs[row], atol=1e-5
                    )
                else:
                    assert result.logprobs[row] <= logprobs[row, -1] + 1e-5

        self._run(check)

    def test_a_deadline_ends_the_step(self) -> None:
        """finish="deadline" with what was sampled until then; none left is an error."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            over = StepRequest(ctx, 1_000_000, deadline_s=0.0)
            await self._needs(runtime, "deadline", lambda: runtime.forward_step(over))
            await self._raises(DeadlineExceeded, runtime.forward_step(over))
            result = await runtime.forward_step(StepRequest(ctx, 1_000_000, deadline_s=1e-6))
            assert result.finish == "deadline"
            length = len(PROMPT) + len(result.token_ids)
            assert (await runtime.forward_step(StepRequest(ctx, 1))).start == length

        self._run(check)

    def test_a_stop_text_ends_the_step(self) -> None:
        """With the tokens that hold it; ``stop_text`` says which one."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            await self._needs(
                runtime,
                "stop_texts",
                lambda: runtime.forward_step(StepRequest(ctx, 1, stop_texts=("x",))),
            )
            assert self.vocabulary is not None, "an engine with stop_texts names its vocabulary"
            free = await self._sample(runtime, 24)
            words = [self.vocabulary.bytes_of(int(token)) for token in free.token_ids]
            text = next(word for word in words[2:] if word and word.isascii()).decode()
            end = next(n for n in range(25) if text.encode() in b"".join(words[:n]))
            request = StepRequest(ctx, 24, stop_texts=("never said", text))
            result = await runtime.forward_step(request)
            assert (result.finish, result.stop_text) == ("stop", text)
            np.testing.assert_array_equal(result.token_ids, free.token_ids[:end])

        self._run(check)

    def test_a_constraint_holds(self) -> None:
        """The text matches, and the mask of each token allows it."""

        async def check(runtime: ModelRuntime) -> None:
            ctx = await runtime.init_context(PROMPT, POLICY)
            vocabulary = self.vocabulary
            ends = () if vocabulary is None else vocabulary.eos_ids
            request = StepRequest(ctx, 20, stop_ids=ends, constraint=Constraint("regex", "[ab]{3}"))
            await self._needs(runtime, "constraints", lambda: runtime.forward_step(request))
            if vocabulary is None:
                raise Declined("constrains, and the suite was not told its vocabulary")
            result = await runtime.forward_step(request)
            text = b"".join(
                vocabulary.bytes_of(int(t)) for t in result.token_ids if int(t) not in ends
            )
            assert len(text) == 3 and set(text) <= set(b"ab")
            assert result.masks is not None and len(result.masks) == len(result.token_ids)
            bits = np.unpackbits(result.masks, axis=1, bitorder="little")
            assert bits[np.arange(len(bits)), result.token_ids].all()

        self._run(check)

    async def _streaming(self, runtime: ModelRuntime) -> Streaming:
        if "stream" not in (await runtime.info()).capabilities:
            raise Declined("has no streams")
        assert isinstance(runtime, Streaming)
        return runtime


async def _drain(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass
