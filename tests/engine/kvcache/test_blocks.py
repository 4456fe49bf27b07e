"""BlockPool against a model that counts references in a dict."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import CapacityError
from engine.kvcache.blocks import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders own lists of blocks, as contexts do."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []

    def references(self) -> dict[int, int]:
        counts = dict.fromkeys(range(1, NUM_BLOCKS + 1), 0)
        for block in chain.from_iterable(self.holders):
            counts[block] += 1
        return counts

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        unowned = {block for block, held in self.references().items() if not held}
        if count > len(unowned):
            with pytest.raises(CapacityError, match=f"{count} KV blocks wanted"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and set(blocks) <= unowned
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.holders)))
        self.pool.share(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        kept = set(chain.from_iterable(self.holders))
        assert self.pool.free(holder) == len(set(holder) - kept)

    @invariant()
    def counts_agree(self) -> None:
        held = self.references()
        assert {block: self.pool.references(block) for block in held} == held
        assert self.pool.num_free == sum(not count for count in held.values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_block_is_freed_once():
    """A second free is a bug of ours, not an error of the caller."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(blocks)
