"""What a step can be asked for besides tokens: stops, seeds, alternatives, deadlines, streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.vocabulary import Vocabulary
from engine.errors import DeadlineExceeded, InvalidStateError, NotSupportedError
from engine.light.engine import LightEngine
from engine.light.stop_texts import StopTexts
from engine.runtime.protocol import Streaming
from engine.runtime.types import (
    Constraint,
    ContextPolicy,
    DrawKey,
    Sampling,
    StepDelta,
    StepRequest,
    StepResult,
)
from tests.engine.tiny import ENGINE, MODEL, make_engine, make_weights

PROMPT = list(range(1, 40))
POLICY = ContextPolicy(draw=DrawKey(3))
# 83 tokens: bytes of three characters of two and three bytes, words, and letters
PIECES = [b"\xc3", b"\xa9", b"\xe4", b"\xb8", b"\xad", b"ab", b"bca", b"caab"]
VOCABULARY = Vocabulary(
    (*PIECES, *(bytes([65 + i % 26]) for i in range(74)), b"<|end|>"),
    (82,),
    frozenset({82}),
)
Check = Callable[[LightEngine], Awaitable[None]]


@pytest.fixture(scope="module")
def engine():
    weights = make_weights()
    engine = LightEngine(MODEL, ENGINE, fetch_weights=lambda _: weights, vocabulary=VOCABULARY)
    yield engine
    engine.close()


def run(check: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(check, timeout=60)

    asyncio.run(limited())


async def step(engine: LightEngine, policy: ContextPolicy = POLICY, **asked) -> StepResult:
    ctx = await engine.init_context(PROMPT, policy)
    asked = {"max_new_tokens": 24, **asked}
    result = await engine.forward_step(StepRequest(ctx, **asked))
    await engine.release(ctx)
    return result


# -- stops -----------------------------------------------------------------------------------------

TEXTS = st.lists(st.text("aé中", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.text("aé中", max_size=12), TEXTS, st.randoms())
def test_a_stop_text_is_found_however_its_bytes_are_cut(text, stops, random):
    """It ends the step with the token in which it ends, as a search in the whole text says."""
    data = text.encode()
    cuts = sorted(random.sample(range(len(data) + 1), random.randint(0, min(6, len(data)))))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    matcher = StopTexts(stops)
    found = None
    end = 0
    for token in tokens:
        end += len(token)
        found = matcher.push(token)
        if found is not None:
            break
    ends = [data.find(s.encode()) + len(s.encode()) for s in stops if s.encode() in data]
    assert (found is not None) == bool(ends)
    if found is not None:
        first = data.find(found.encode()) + len(found.encode())
        assert first == min(ends) and end - len(token) < first <= end


def test_stop_texts_end_a_step_and_their_tokens_stay(engine: LightEngine):
    """Of a text that spans three sampled tokens; the result says which text it was."""

    async def check() -> None:
        free = await step(engine)
        spelled = [VOCABULARY.bytes_of(t) for t in free.token_ids.tolist()]
        wanted = b"".join(spelled[9:12]).decode("utf-8", "surrogateescape")
        stopped = await step(engine, stop_texts=("no such text", wanted))
        end = next(
            i + 1
            for i in range(len(spelled))
            if b"".join(spelled[9:12]) in b"".join(spelled[: i + 1])
        )
        np.testing.assert_array_equal(stopped.token_ids, free.token_ids[:end])
        np.testing.assert_array_equal(stopped.logprobs, free.logprobs[:end])
        assert (stopped.finish, stopped.stop_text) == ("stop", wanted)
        assert (free.finish, free.stop_text) == ("length", None)

    run(check())


def test_what_needs_a_vocabulary_is_refused_without_one():
    """Texts and constraints cannot be kept by an engine that knows ids only."""

    async def check() -> None:
        constraint = Constraint("regex", "a+")
        with pytest.raises(NotSupportedError, match=r"stop_texts.*without a vocabulary"):
            await step(plain, stop_texts=("x",))
        with pytest.raises(NotSupportedError, match=r"constraint.*without a vocabulary"):
            await step(plain, constraint=constraint)
        assert not {"stop_texts", "constraints"} & (await plain.info()).capabilities

    plain = make_engine()
    try:
        run(check())
    finally:
        plain.close()


# -- sampling --------------------------------------------------------------------------------------


def test_a_seed_names_the_draws(engine: LightEngine):
    """The same tokens at any time and in any batch; a policy's own draw key goes before it."""

    async def check() -> None:
        hot, free = Sampling(2.0, seed=7), ContextPolicy()
        alone = await step(engine, free, sampling=hot)
        other, *same = await asyncio.gather(
            step(engine, free, sampling=Sampling(2.0, seed=8)),
            *(step(engine, free, sampling=hot) for _ in range(3)),
        )
        for result in same:
            np.testing.assert_array_equal(result.token_ids, alone.token_ids)
        assert other.token_ids.tolist() != alone.token_ids.tolist()
        keyed = await step(engine, sampling=hot)
        np.testing.assert_array_equal(
            keyed.token_ids, (await step(engine, sampling=Sampling(2.0))).token_ids
        )

    run(check())


def test_penalties_count_what_this_context_sampled(engine: LightEngine):
    """In this step and the ones before it; not the prompt, but for repetition_penalty."""

    async def check() -> None:
        strong = Sampling(0.0, presence_penalty=50.0)
        ctx = await engine.init_context(PROMPT, POLICY)
        first = await engine.forward_step(StepRequest(ctx, 12, strong))
        await engine.append(ctx, [50, 51])
        second = await engine.forward_step(StepRequest(ctx, 12, strong))
        tokens = [*first.token_ids.tolist(), *second.token_ids.tolist()]
        assert len(set(tokens)) == 24
        assert set(tokens) & set(PROMPT)
        apart = await step(engine, sampling=Sampling(0.0, repetition_penalty=1e6))
        assert not set(apart.token_ids.tolist()) & set(PROMPT)
        assert len(set(apart.token_ids.tolist())) == 24

    run(check())


def test_biases_and_alternatives(engine: LightEngine):
    """A bias can decide; alternatives stand beside each token, likeliest first."""

    async def check() -> None:
        result = await step(engine, sampling=Sampling(0.0, logit_bias=((17, 100.0),)))
        assert set(result.token_ids.tolist()) == {17}
        told = await step(engine, num_logprobs=5)
        assert told.top_ids is not None and told.top_logprobs is not None
        assert told.top_ids.shape == told.top_logprobs.shape == (24, 5)
        assert (np.diff(told.top_logprobs) <= 0).all()
        for token, logprob, ids, logprobs in zip(
            told.token_ids, told.logprobs, told.top_ids, told.top_logprobs, strict=True
        ):
            if token in ids:
                assert logprobs[ids.tolist().index(token)] == logprob
            else:
                assert logprob <= logprobs[-1]
        plain = await step(engine)
        np.testing.assert_array_equal(plain.token_ids, told.token_ids)
        assert plain.top_ids is None
        with pytest.raises(InvalidStateError, match="num_logprobs=21"):
            await step(engine, num_logprobs=21)

    run(check())


# -- ends ------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_step_with_what_it_sampled(engine: LightEngine):
    """The context goes on behind it; a deadline that has passed begins nothing."""

    async def check() -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        late = await engine.forward_step(StepRequest(ctx, 100, deadline_s=1e-4))
        assert late.finish == "deadline" and len(late.token_ids) < 100
        rest = await engine.forward_step(StepRequest(ctx, 3, deadline_s=60.0))
        assert (rest.finish, rest.start) == ("length", late.start + len(late.token_ids))
        whole = await step(engine, max_new_tokens=len(late.token_ids) + 3)
        np.testing.assert_array_equal(
            [*late.token_ids, *rest.token_ids], whole.token_ids.astype(np.int64)
        )
        with pytest.raises(DeadlineExceeded, match="no time left"):
            await step(engine, deadline_s=0.0)

    run(check())


# -- streams ---------------------------------------------------------------------------------------


async def streamed(engine: Streaming, request: StepRequest) -> tuple[list[StepDelta], StepResult]:
    deltas: list[StepDelta] = []
    result: StepResult | None = None
    async for part in engine.stream_step(request):
        assert result is None, "the result comes last"
        if isinstance(part, StepResult):
            result = part
        else:
            deltas.append(part)
    assert result is not None
    return deltas, result


@pytest.mark.parametrize("beside", [0, 5])
def test_deltas_add_up_to_the_result(engine: LightEngine, beside: int):
    """Alone and in a batch; and the result is that of forward_step."""

    async def check() -> None:
        assert isinstance(engine, Streaming)
        others = [
            asyncio.create_task(step(engine, ContextPolicy(draw=DrawKey(i + 9))))
            for i in range(beside)
        ]
        ctx = await engine.init_context(PROMPT, POLICY)
        deltas, result = await streamed(engine, StepRequest(ctx, 24, num_logprobs=2))
        expected = await step(engine, num_logprobs=2)
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
            told = np.concatenate([getattr(delta, name) for delta in deltas])
            np.testing.assert_array_equal(told, getattr(result, name))
            np.testing.assert_array_equal(told, getattr(expected, name))
        await asyncio.gather(*others)

    run(check())


def test_a_closed_stream_cancels_its_step(engine: LightEngine):
    """The context is free at once, and holds what was sampled until then."""

    async def check() -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        async with contextlib.aclosing(engine.stream_step(StepRequest(ctx, 110))) as stream:
            first = await anext(stream)
        assert isinstance(first, StepDelta)
        await engine.append(ctx, [1])
        rest = await engine.forward_step(StepRequest(ctx, 1))
        assert len(PROMPT) + len(first.token_ids) < rest.start < len(PROMPT) + 110

    run(check())


def test_errors_reach_a_stream(engine: LightEngine):
    """At its first part, as they are."""

    async def check() -> None:
        ctx = await engine.init_context(PROMPT, POLICY)
        with pytest.raises(InvalidStateError, match="max_new_tokens=0"):
            await streamed(engine, StepRequest(ctx, 0))

    run(check())
