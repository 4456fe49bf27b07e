"""ContextTable: which contexts exist, which blocks hold their KV, and who gives room when it is
short. Single-threaded; computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from engine.config import EngineConfig
from engine.errors import CapacityError, ContextLost, InvalidStateError, NotSupportedError
from engine.kvcache.blocks import BlockPool
from engine.kvcache.paged import PagedKV
from engine.light.context import Context
from engine.light.draws import check_key
from engine.model.config import ModelConfig
from engine.runtime.types import ContextId, ContextPolicy, EvictResult, EvictSelector, KVSummary


class ContextTable:
    """``tables`` int64 [max_contexts, J]: physical block by slot and logical block, 0 = none."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig, kv: PagedKV) -> None:
        self._model_config = model_config
        self._config = config
        self._kv = kv
        self.pool = BlockPool(config.num_blocks)
        self._contexts: dict[ContextId, Context] = {}
        self._slots = list(range(config.max_contexts - 1, -1, -1))
        self._poisoned: set[int] = set()
        blocks_per_context = -(-config.max_context // config.block_size)
        self.tables = np.zeros((config.max_contexts, blocks_per_context), np.int64)

    def __iter__(self) -> Iterator[Context]:
        return iter(list(self._contexts.values()))

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, ctx: ContextId) -> Context | None:
        return self._contexts.get(ctx)

    def idle(self, ctx: ContextId, action: str) -> Context:
        """ContextLost when unknown, InvalidStateError when a step or fork still runs."""
        context = self._contexts.get(ctx)
        if context is None:
            raise ContextLost(
                f"{action}: context {ctx} is unknown (released, or the engine restarted); rebuild "
                "it with init_context"
            )
        if not context.is_idle:
            doing = "a step" if context.step is not None else "a fork"
            raise InvalidStateError(
                f"{action}: context {ctx} is running {doing}; await it or cancel it first"
            )
        return context

    def open(self, ctx: ContextId, tokens: list[int], policy: ContextPolicy) -> Context:
        self._check_policy(policy)
        if not tokens:
            raise InvalidStateError("init_context got no tokens, expected at least one")
        self._check_tokens(tokens, len(tokens))
        if not self._slots:
            raise CapacityError(
                f"{self._config.max_contexts} contexts are open, the most allowed; release some or "
                "raise engine.max_contexts"
            )
        layers, top_k = self._model_config.num_moe_layers, self._model_config.num_experts_per_tok
        experts = np.zeros((len(tokens), layers, top_k), np.int16)
        todo = list(range(len(tokens)))
        context = Context(ctx, policy, self._slots.pop(), tokens, todo, experts)
        self._contexts[ctx] = context
        return context

    def append(self, ctx: ContextId, tokens: list[int]) -> None:
        context = self.idle(ctx, "append")
        self._check_tokens(tokens, len(context.tokens) + len(tokens))
        start = len(context.tokens)
        context.tokens += tokens
        context.todo += range(start, len(context.tokens))

    def close(self, context: Context) -> None:
        del self._contexts[context.id]
        self.drop(context, list(context.blocks))
        self._slots.append(context.slot)

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

    def evict(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        """Whole blocks that hold any token of [start, end), rounded outward."""
        context = self.idle(ctx, "evict_kv")
        length, size = len(context.tokens), self._config.block_size
        if not 0 <= selector.start <= selector.end <= length:
            raise InvalidStateError(
                f"evict_kv [{selector.start}, {selector.end}) of a context of "
                f"{length} tokens; expected 0 <= start <= end <= length"
            )
        wanted = range(selector.start // size, -(-selector.end // size))
        gone = [b for b in wanted if b in context.blocks and selector.end > selector.start]
        freed = self.drop(context, gone)
        return EvictResult(
            evicted=tuple((b * size, min((b + 1) * size, length)) for b in gone),
            freed_bytes=freed * self._kv.bytes_per_block,
        )

    def summary(self, ctx: ContextId) -> KVSummary:
        """``kv_bytes`` counts a shared block once for each context that holds it."""
        context = self.idle(ctx, "get_kv_summary")
        return KVSummary(
            num_tokens=len(context.tokens),
            num_hot=len(context.tokens) - len(context.todo),
            num_warm=0,
            num_cold=0,
            kv_bytes=len(context.blocks) * self._kv.bytes_per_block,
        )

    def forget_computed(self) -> None:
        """All KV is stale: keep the blocks, compute every position again."""
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
        """Drop blocks that may hold NaN; they are zeroed before they are used again, because a
        masked position still multiplies by what it holds. Not now: a fork may read them."""
        self._poisoned.update(context.blocks.values())
        self.drop(context, list(context.blocks))

    def drop_tail(self, context: Context) -> None:
        """Give back blocks past the last token: a step that failed leaves them behind."""
        last = (len(context.tokens) - 1) // self._config.block_size
        self.drop(context, [logical for logical in context.blocks if logical > last])

    def cover(self, context: Context, positions: list[int]) -> None:
        """A physical block for each position, taken from idle contexts if the pool is empty."""
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

    def reclaim(self, victims: Iterable[Context], num_blocks: int) -> None:
        """Drop the KV of ``victims`` in order until ``num_blocks`` are free."""
        for victim in victims:
            if self.pool.num_free >= num_blocks:
                return
            self.drop(victim, list(victim.blocks))

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

    def _check_policy(self, policy: ContextPolicy) -> None:
        if policy.kv != "full" or policy.summaries:
            raise NotSupportedError(
                f"policy kv={policy.kv!r}, summaries={policy.summaries}: LightEngine serves full "
                "KV; see info().capabilities"
            )
        if policy.deterministic and not self._config.deterministic:
            raise NotSupportedError(
                "policy.deterministic=True, but engine.deterministic is False; set it to True"
            )
        if policy.draw is not None:
            check_key(policy.draw)

    def _check_tokens(self, tokens: list[int], length: int) -> None:
        if length > self._config.max_context:
            raise CapacityError(
                f"{length} tokens exceed engine.max_context={self._config.max_context}; shorten "
                "the context or raise the limit"
            )
        bad = [t for t in tokens if not 0 <= t < self._model_config.vocab_size]
        if bad:
            raise InvalidStateError(
                f"token id {bad[0]} is outside the vocabulary of {self._model_config.vocab_size}; "
                "tokenizer and model disagree"
            )
