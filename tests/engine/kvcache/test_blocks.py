"""The block pool under any sequence of allocations, shares and frees."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import CapacityError
from engine.kvcache.blocks import BlockPool

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """A model that only counts: who holds which block how often."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        """All or nothing, and never a block somebody holds."""
        taken = {block for blocks in self.held for block in blocks}
        if count > self.pool.num_free:
            with pytest.raises(CapacityError, match=f"{count} KV blocks wanted"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not taken & set(blocks)
        assert all(1 <= block <= NUM_BLOCKS for block in blocks)
        self.held.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.held:
            blocks = data.draw(st.sampled_from(self.held))
            self.pool.share(blocks)
            self.held.append(list(blocks))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            left = {block for other in self.held for block in other}
            assert self.pool.free(blocks) == len(set(blocks) - left)

    @invariant()
    def counts_agree(self) -> None:
        references = Counter(block for blocks in self.held for block in blocks)
        for block in range(1, NUM_BLOCKS + 1):
            assert self.pool.references(block) == references[block]
        assert self.pool.num_free == NUM_BLOCKS - len(references)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_freeing_twice_is_caught():
    """A double free would give one block to two contexts."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_sharing_a_free_block_is_caught():
    """It may already belong to somebody else."""
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="free and cannot be shared"):
        pool.share([1])
