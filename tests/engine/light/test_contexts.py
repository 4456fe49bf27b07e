"""The context table under any sequence of calls: blocks are neither lost nor given twice."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import CapacityError
from engine.kvcache.paged import PagedKV
from engine.light.context import Context, WaitingFork
from engine.light.paged_contexts import PagedTable
from engine.runtime.types import ContextId, ContextPolicy, EvictSelector
from tests.engine.tiny import ENGINE, MODEL

SIZE, NUM_BLOCKS = 4, 12
CONFIG = ENGINE.model_copy(
    update={"block_size": SIZE, "num_blocks": NUM_BLOCKS, "max_contexts": 6, "max_context": 30}
)


class TableMachine(RuleBasedStateMachine):
    """Opens, appends, computes, forks, evicts and closes at random."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PagedTable(MODEL, CONFIG, PagedKV(1, NUM_BLOCKS, SIZE, 1, 2))
        self.num_opened = 0

    def pick(self, data: st.DataObject) -> Context | None:
        contexts = list(self.table)
        return data.draw(st.sampled_from(contexts)) if contexts else None

    def new_id(self) -> ContextId:
        self.num_opened += 1
        return ContextId(str(self.num_opened))

    @rule(length=st.integers(1, 31))
    def open(self, length: int) -> None:
        full = len(self.table) == 6 or length > 30
        try:
            self.table.open(self.new_id(), [1] * length, ContextPolicy())
        except CapacityError:
            assert full
        else:
            assert not full

    @rule(data=st.data(), count=st.integers(0, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        context = self.pick(data)
        if context is not None and len(context.tokens) + count <= 30:
            self.table.append(context.id, [2] * count)

    @rule(data=st.data(), count=st.integers(1, 30))
    def compute(self, data: st.DataObject, count: int) -> None:
        """As the scheduler does for a busy context; the others are idle, so they give way."""
        context = self.pick(data)
        if context is None:
            return
        rows = context.next_rows(count)
        context.forks.append(WaitingFork(ContextId("busy"), None, Future()))
        try:
            self.table.cover(context, rows)
        except CapacityError:
            return
        finally:
            context.forks.clear()
        assert all(p // SIZE in context.blocks for p in rows)
        del context.todo[: len(rows)]

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        if parent is not None and len(self.table) < 6:
            child = self.new_id()
            self.table.fork(parent, child, None)
            context = self.table.get(child)
            assert context is not None and context.tokens == parent.tokens
            partial = (len(parent.tokens) - 1) // SIZE
            shared = {b for b in context.blocks if context.blocks[b] == parent.blocks.get(b)}
            assert partial not in shared

    @rule(data=st.data(), start=st.integers(0, 30), length=st.integers(0, 30))
    def evict(self, data: st.DataObject, start: int, length: int) -> None:
        context = self.pick(data)
        if context is None or start + length > len(context.tokens):
            return
        result = self.table.evict(context.id, EvictSelector(start, start + length))
        for low, high in result.evicted:
            assert low % SIZE == 0 and low < start + length and high > start

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        context = self.pick(data)
        if context is not None:
            self.table.close(context)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        held = Counter(b for context in self.table for b in context.blocks.values())
        assert self.table.pool.num_free == NUM_BLOCKS - len(held)
        for block in range(1, NUM_BLOCKS + 1):
            assert self.table.pool.references(block) == held[block]

    @invariant()
    def what_is_computed_has_a_block(self) -> None:
        for context in self.table:
            assert context.todo == sorted(set(context.todo))
            assert context.todo[-1] == len(context.tokens) - 1
            done = set(range(len(context.tokens))) - set(context.todo)
            assert {p // SIZE for p in done} <= set(context.blocks)
            row = self.table.tables[context.slot]
            assert {b: int(row[b]) for b in range(len(row)) if row[b]} == context.blocks


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
