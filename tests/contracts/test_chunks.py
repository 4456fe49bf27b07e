"""init_in_chunks when a chunk fails: tried again alone, or everything is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import CapacityError, InvalidStateError, Overloaded
from engine.fakes import ScriptedRuntime
from engine.runtime.chunks import init_in_chunks
from engine.runtime.types import ContextId, ContextPolicy
from tests.contracts.mri_server import scramble

POLICY = ContextPolicy()
PROMPT = list(range(50))


class Flaky(ScriptedRuntime):
    """Its n-th fork, which is how a chunk is computed, has no room; so long as it is told."""

    def __init__(self, fails: dict[int, Exception]) -> None:
        super().__init__(scramble, vocab_size=64, max_context=96)
        self.fails = fails
        self.forks = 0

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        self.forks += 1
        if self.forks in self.fails:
            raise self.fails[self.forks]
        return await super().fork(ctx, policy)

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        return await super().init_context(token_ids, policy, media)


def test_a_failed_chunk_is_tried_again_alone():
    """Chunks before it are not computed twice."""
    runtime = Flaky({3: CapacityError("no room"), 4: Overloaded("busy", 0.01)})
    chunked = asyncio.run(init_in_chunks(runtime, PROMPT, POLICY, chunk_tokens=20, pause_s=0.001))
    assert chunked.attempts == (1, 1, 3) and runtime.forks == 5
    assert asyncio.run(runtime.info()).num_contexts == 1


@pytest.mark.parametrize("independent", [False, True])
def test_a_chunk_that_fails_for_good_gives_everything_back(independent: bool):
    async def check() -> None:
        runtime = Flaky({n: CapacityError("no room") for n in range(2, 50)})
        with pytest.raises(CapacityError, match="no room"):
            await init_in_chunks(
                runtime, PROMPT, POLICY, chunk_tokens=20, pause_s=0.001,
                independent_chunks=independent,
            )  # fmt: skip
        assert (await runtime.info()).num_contexts == 0

    asyncio.run(check())


def test_what_would_fail_again_is_not_tried_again():
    runtime = Flaky({})
    with pytest.raises(CapacityError, match="max_context"):
        asyncio.run(init_in_chunks(runtime, PROMPT * 3, POLICY, chunk_tokens=40))
    assert asyncio.run(runtime.info()).num_contexts == 0


def test_summaries_are_asked_for_each_chunk():
    """In contexts of their own, which are gone afterwards."""

    async def check() -> None:
        runtime = Flaky({})
        chunked = await init_in_chunks(runtime, PROMPT, POLICY, chunk_tokens=20, summaries=True)
        assert chunked.summaries == (None, None, None)
        assert (await runtime.info()).num_contexts == 1

    asyncio.run(check())


def test_independent_chunks_have_no_one_context():
    async def check() -> None:
        chunked = await init_in_chunks(
            Flaky({}), PROMPT, POLICY, chunk_tokens=20, independent_chunks=True
        )
        assert chunked.approximate and len(chunked.contexts) == 3
        with pytest.raises(InvalidStateError, match="3 independent chunks"):
            _ = chunked.ctx

    asyncio.run(check())


def test_bad_arguments():
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        asyncio.run(init_in_chunks(Flaky({}), PROMPT, POLICY, chunk_tokens=0))
    with pytest.raises(InvalidStateError, match="no tokens"):
        asyncio.run(init_in_chunks(Flaky({}), [], POLICY))
