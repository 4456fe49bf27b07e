"""PagedTable: contexts whose KV lies in full precision in blocks of one pool."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.config import EngineConfig
from engine.kvcache.blocks import BlockPool
from engine.kvcache.paged import PagedKV
from engine.light.context import Context
from engine.light.contexts import ContextTable
from engine.light.debug import PartClock
from engine.light.paged_rows import PagedRows
from engine.light.rows import Plan
from engine.light.timed_rows import TimedPagedRows
from engine.model.config import ModelConfig
from engine.runtime.types import ContextId, ContextPolicy, EvictResult, EvictSelector, KVSummary


class PagedTable(ContextTable):
    """``tables`` int64 [max_contexts, J]: physical block by slot and logical block, 0 = none."""

    kv = "full"

    def __init__(self, model_config: ModelConfig, config: EngineConfig, kv: PagedKV) -> None:
        super().__init__(model_config, config)
        self._kv = kv
        self.pool = BlockPool(config.num_blocks)
        self._poisoned: set[int] = set()
        blocks_per_context = -(-config.max_context // config.block_size)
        self.tables = np.zeros((config.max_contexts, blocks_per_context), np.int64)

    @property
    def used_bytes(self) -> int:
        return (self.pool.num_blocks - self.pool.num_free) * self._kv.bytes_per_block

    @property
    def total_bytes(self) -> int:
        return self.pool.num_blocks * self._kv.bytes_per_block

    def fork(self, parent: Context, child: ContextId, policy: ContextPolicy | None) -> None:
        """Share full blocks; copy the one that both would write to."""
        context = self.open(child, list(parent.tokens), policy or parent.policy)
        size = self._config.block_size
        missing = set(parent.todo)
        incomplete = {position // size for position in missing}
        partial = (len(parent.tokens) - 1) // size  # holds the last token: written next
        for logical, physical in sorted(parent.blocks.items()):
            if logical == partial:
                self._copy_block(context, logical, physical)
            elif logical < partial and logical not in incomplete:
                self.pool.share([physical])
                self._own(context, logical, physical)
        context.todo = [
            p for p in range(len(context.tokens)) if p in missing or p // size not in context.blocks
        ]
        context.experts = parent.experts.copy()

    def _evict(self, context: Context, selector: EvictSelector) -> EvictResult:
        """Rounded outward to blocks."""
        length, size = len(context.tokens), self._config.block_size
        wanted = range(selector.start // size, -(-selector.end // size))
        gone = [b for b in wanted if b in context.blocks and selector.end > selector.start]
        freed = self.drop(context, gone)
        return EvictResult(
            evicted=tuple((b * size, min((b + 1) * size, length)) for b in gone),
            freed_bytes=freed * self._kv.bytes_per_block,
        )

    def summary(self, ctx: ContextId) -> KVSummary:
        context = self.idle(ctx, "get_kv_summary")
        return KVSummary(
            num_tokens=len(context.tokens),
            num_hot=len(context.tokens) - len(context.todo),
            num_warm=0,
            num_cold=0,
            kv_bytes=len(context.blocks) * self._kv.bytes_per_block,
        )

    def forget_computed(self) -> None:
        """The blocks stay."""
        for context in self._contexts.values():
            context.todo = list(range(len(context.tokens)))

    def drop(self, context: Context, logical: list[int]) -> int:
        """Give blocks back and note their positions as missing; how many became free."""
        if not logical:
            return 0
        size, length = self._config.block_size, len(context.tokens)
        freed = self.pool.free([context.blocks.pop(b) for b in logical])
        self.tables[context.slot, logical] = 0
        lost = {p for b in logical for p in range(b * size, min((b + 1) * size, length))}
        context.todo = sorted(lost.union(context.todo))
        return freed

    def drop_poisoned(self, context: Context) -> None:
        """Blocks are zeroed before they are used again, because a masked position still multiplies
        by what it holds. Not now: a fork may read them."""
        self._poisoned.update(context.blocks.values())
        self.drop(context, list(context.blocks))

    def drop_tail(self, context: Context) -> None:
        last = (len(context.tokens) - 1) // self._config.block_size
        self.drop(context, [logical for logical in context.blocks if logical > last])

    def cover(self, context: Context, positions: list[int]) -> None:
        size = self._config.block_size
        missing = [
            b for b in dict.fromkeys(p // size for p in positions) if b not in context.blocks
        ]
        if not missing:
            return
        if len(missing) > self.pool.num_free:
            idle = [other for other in self._contexts.values() if other.is_idle]
            self.reclaim(sorted(idle, key=lambda c: c.served), len(missing))
        for logical, physical in zip(missing, self._allocate(len(missing)), strict=True):
            self._own(context, logical, physical)

    def make_room(self, context: Context, positions: list[int], victims: Iterable[Context]) -> None:
        self.reclaim(victims, len(positions) // self._config.block_size + 2)

    def reclaim(self, victims: Iterable[Context], num_blocks: int) -> None:
        """Drop the KV of ``victims`` in order until ``num_blocks`` are free."""
        for victim in victims:
            if self.pool.num_free >= num_blocks:
                return
            self.drop(victim, list(victim.blocks))

    def rows(self, plan: Plan, clock: PartClock | None = None) -> PagedRows:
        slots: list[int] = []
        positions: list[int] = []
        for context, rows in plan:
            slots += [context.slot] * len(rows)
            positions += rows
        width = max(positions) // self._config.block_size + 1
        tables = self.tables[np.array(slots), :width]
        if clock is not None:
            timed = TimedPagedRows(self._kv, tables, np.array(positions, np.int64))
            timed.clock = clock
            return timed
        return PagedRows(self._kv, tables, np.array(positions, np.int64))

    def check_debug(self) -> None:
        """All of them can."""

    def skip_summaries(self, skip: bool) -> None:
        """There are none."""

    def warm_up(self, rounds: int) -> int:
        free = self.pool.num_free
        for _ in range(rounds):
            blocks = self.pool.allocate(free)
            self._kv.clear_blocks(blocks)
            self._poisoned.difference_update(blocks)
            # the order in which they were taken
            self.pool.free(blocks[::-1])
        return free

    def _drop_all(self, context: Context) -> None:
        self.drop(context, list(context.blocks))

    def begin_batch(self) -> None:
        """A block that ``cover`` promised is its context's at once."""

    def end(self) -> None:
        """The pool goes with the table."""

    def _opened(self, context: Context) -> None:
        """Blocks come with ``cover``."""

    def _closed(self, context: Context) -> None:
        self.drop(context, list(context.blocks))

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        for block in self._poisoned.intersection(blocks):
            self._kv.clear_block(block)
            self._poisoned.remove(block)
        return blocks

    def _own(self, context: Context, logical: int, physical: int) -> None:
        context.blocks[logical] = physical
        self.tables[context.slot, logical] = physical

    def _copy_block(self, context: Context, logical: int, source: int) -> None:
        """Copy on write; without room the child computes the block again."""
        if self.pool.num_free:
            (copy,) = self._allocate(1)
            self._kv.copy_block(source, copy)
            self._own(context, logical, copy)
