"""TieredTable: contexts whose KV lies in TieredKV, read by hybrid attention.

What a query reads depends on how old each block was when it ran: a block that turned to codes since
then cannot be read in full precision again. So a context is always computed in order, the missing
positions are its last ones, and dropping some of the others means to compute all of them again, but
for the newest. In deterministic mode LightEngine never lets TieredKV demote blocks for want of
room: it would be read differently; idle contexts give all their KV instead. Otherwise the oldest
warm blocks go to the cold tier first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from engine.attention.config import HybridConfig
from engine.attention.retrieve import selection_width
from engine.config import EngineConfig
from engine.errors import BlockCorrupt, CapacityError, EngineError, NotSupportedError
from engine.kvcache.layout import HeldBytes
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import State, warm_end
from engine.kvcache.turns import TurnRouter
from engine.light import tier_relief as relief
from engine.light.alarms import CacheState
from engine.light.block_summaries import BlockSummaries
from engine.light.context import Context
from engine.light.contexts import ContextTable
from engine.light.debug import PartClock
from engine.light.hot_watch import HotWatch
from engine.light.hybrid_rows import HybridRows, Through, through_torch
from engine.light.kernel_rows import KernelRows, check_kernels
from engine.light.learnt_indices import LearntIndices
from engine.light.rows import Plan
from engine.light.turn_starts import TurnStarts, serve_all
from engine.model.config import ModelConfig
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EvictResult,
    EvictSelector,
    KVSummary,
    RewarmPolicy,
    RewarmResult,
)

Slots = tuple[int, int]
"""Of the full-precision pool and of the warm one."""


class TieredTable(ContextTable):
    kv = "tiered"

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        kv: TieredKV,
        router: TurnRouter | None = None,
        kernels: bool = False,
    ) -> None:
        """``kernels``: rows are read by engine.kernels. NotSupportedError when they cannot."""
        super().__init__(model_config, config)
        self._router = router
        self.has_summaries = router is not None and router.has_summaries
        self._turns = TurnStarts(kv, router, self._warm_room)
        self.watch: HotWatch | None = None
        """Where the hot zone follows attention."""
        if config.hot_zone is not None:
            window = model_config.attention.hybrid.window
            self.watch = HotWatch(config.hot_zone, kv, model_config.num_hidden_layers, window)
        self._kv = kv
        self._hybrid = model_config.attention.hybrid
        """As rows are read now, see ``skip_summaries``."""
        self._through_torch: Through | None = None
        if kernels:
            check_kernels(kv, self._hybrid, config.hot_zone)
        else:
            self._through_torch = through_torch(kv, self._hybrid)
            # asked now: the compiler must not run when a peak begins
            self._through_plain = through_torch(kv, _without_summaries(self._hybrid))
            self._through_whole = self._through_torch
        self._report_codes = config.report_codes and kv.config.profile != "full"
        self._summaries = BlockSummaries.of(model_config)
        self._indices = LearntIndices.of(model_config.attention.hybrid)
        self._promised: Slots = (0, 0)
        self._loading: set[ContextId] = set()
        """Contexts with cold blocks on their way back."""
        heads = model_config.num_attention_heads // model_config.cached_heads
        hybrid = model_config.attention.hybrid
        self._selection_shape = (
            model_config.num_hidden_layers,
            model_config.cached_heads,
            1 if hybrid.topk_shared else heads,
            selection_width(hybrid),
        )

    @property
    def used_bytes(self) -> int:
        return self._kv.used_bytes

    @property
    def total_bytes(self) -> int:
        return self._kv.allocated_bytes

    def held_bytes(self) -> HeldBytes:
        return self._kv.held_bytes()

    def fork(self, parent: Context, child: ContextId, policy: ContextPolicy | None) -> None:
        """Every block is shared; who writes to a shared one first gets a copy."""
        context = self.open(child, list(parent.tokens), policy or parent.policy)
        self._kv.release(child)
        self._kv.fork(parent.id, child)
        if self._summaries is not None:
            self._summaries.fork(parent.id, child)
        context.todo = list(parent.todo)
        context.shares_tail = parent.shares_tail = _held(parent) % BLOCK > 0
        context.experts = parent.experts.copy()
        assert parent.selections is not None, "hybrid attention records selections"
        context.selections = parent.selections.copy()
        context.codes = None if parent.codes is None else dict(parent.codes)
        context.turn, context.replayed = parent.turn, parent.replayed
        if self.watch is not None:
            self.watch.fork(parent.id, child)
        if parent.id in self._loading:
            self._loading.add(child)

    def append(self, ctx: ContextId, tokens: list[int]) -> None:
        super().append(ctx, tokens)
        if tokens:
            context = self._contexts[ctx]
            self._turns.begin(context, len(context.tokens) - len(tokens))

    def before_batch(self, contexts: Iterable[Context]) -> list[tuple[Context, EngineError]]:
        self.begin_batch()
        loading, failed = serve_all(self._turns, contexts, _held)
        self._loading |= {context.id for context in loading}
        for context, error in failed:
            if isinstance(error, BlockCorrupt):
                self._drop(context)
        return failed

    def _evict(self, context: Context, selector: EvictSelector) -> EvictResult:
        """Everything from the first block on, or all blocks when that cannot be computed again to
        the same bits. To cold: coded blocks alone, waits until their records are written."""
        if selector.to == "cold":
            return self._send_to_cold(context, selector)
        held, used = _held(context), self._kv.used_bytes
        start = selector.start - selector.start % BLOCK
        if start >= held or selector.end == selector.start:
            return EvictResult((), 0)
        self._cut(context, start)
        first = _held(context)
        ranges = [(b, min(b + BLOCK, held)) for b in range(first, held, BLOCK)]
        return EvictResult(tuple(ranges), freed_bytes=used - self._kv.used_bytes)

    def _send_to_cold(self, context: Context, selector: EvictSelector) -> EvictResult:
        """What is in full precision stays: attention wants no gap there."""
        ctx, before = context.id, len(self._kv.events(context.id))
        coded = BLOCK * warm_end(_held(context), self._kv.config_of(ctx))
        # the sink counts as coded, even before it is computed
        end = min(selector.end, coded, _held(context))
        result = self._kv.evict(ctx, min(selector.start, end), end, to="cold")
        self._turns.moved(context, before)
        return result

    def rewarm(
        self, ctx: ContextId, selector: EvictSelector, policy: RewarmPolicy, timeout_s: float
    ) -> RewarmResult:
        """The engine waits with everything else while blocks load. BlockCorrupt: the context's KV
        is dropped, its next step computes it again."""
        context = self.idle(ctx, "rewarm_kv")
        self._check_range("rewarm_kv", context, selector)
        end = min(selector.end, _held(context))
        start = min(selector.start, end)
        states = self._kv.states(ctx)[start // BLOCK : -(-end // BLOCK)]
        cold = (State.COLD_HOST, State.COLD_DISK)
        self.begin_batch()
        self._warm_room(context, sum(state in cold for state in states))
        before = len(self._kv.events(ctx))
        try:
            done = self._kv.rewarm(ctx, start, end, policy, timeout_s)
        except BlockCorrupt:
            self._drop(context)
            raise
        self._turns.moved(context, before)
        if done.pending:
            self._loading.add(ctx)
        if done.lost:
            self._drop(context)
        loaded, pending, lost = (
            tuple((b * BLOCK, (b + 1) * BLOCK) for b in blocks)
            for blocks in (done.loaded, done.pending, done.lost)
        )
        return RewarmResult(loaded, pending, lost)

    def summary(self, ctx: ContextId) -> KVSummary:
        context = self.idle(ctx, "get_kv_summary")
        # blocks on their way count where they arrive
        self._kv.settle()
        held = self._kv.summary(ctx)
        return KVSummary(
            num_tokens=len(context.tokens),
            num_hot=held.num_hot,
            num_warm=held.num_warm,
            num_cold=held.num_cold,
            kv_bytes=held.kv_bytes,
            vectors=self._vectors(context) if context.policy.summaries else None,
            cold_bytes=held.cold_bytes,
        )

    def _vectors(self, context: Context) -> np.ndarray:
        assert self._router is not None, "the policy was checked when the context was opened"
        cold = self._kv.cold_blocks(context.id)
        return self._router.vectors(context.id, context.tokens, cold)

    def forget_computed(self) -> None:
        """Slots go back: the new KV is written in order of age, as the old was."""
        for context in self._contexts.values():
            self._drop(context)

    def drop_poisoned(self, context: Context) -> None:
        """A full-precision slot is zeroed when it is taken, a warm one is written whole."""
        self._drop(context)

    def drop_tail(self, context: Context) -> None:
        self._cut(context, len(context.tokens) - 1)

    def begin_batch(self) -> None:
        self._promised = (0, 0)
        for ctx in list(self._loading):
            self._look_after_loads(ctx)

    def cover(self, context: Context, positions: list[int]) -> None:
        wanted = self._wanted(context, positions)
        if not self._fits(wanted):
            self._relieve(context, wanted[1])
            self._reclaim_idle(wanted, but=context)
        if not self._fits(wanted):
            raise self._no_room(wanted)
        full, warm = self._promised
        self._promised = (full + wanted[0], warm + wanted[1])

    def make_room(self, context: Context, positions: list[int], victims: Iterable[Context]) -> None:
        self.begin_batch()
        self._reclaim(victims, self._wanted(context, positions))

    def check_debug(self) -> None:
        if self._through_torch is None:
            raise NotSupportedError(
                "debug: engine.kernels='triton' reads in kernels whose parts have no clock; set it "
                "to 'torch' to look"
            )

    def rows(self, plan: Plan, clock: PartClock | None = None) -> HybridRows:
        batch = [(context.id, positions) for context, positions in plan]
        hybrid, shape = self._hybrid, self._selection_shape
        if self._through_torch is None:
            rows = KernelRows(self._kv, hybrid, shape, batch, self._report_codes)
        else:
            read = (hybrid, shape, self._through_torch, batch, self._report_codes)
            rest = (self.watch, self._summaries, self._indices)
            if clock is None:
                rows = HybridRows(self._kv, *read, *rest)
            else:
                from engine.light.timed_rows import TimedHybridRows

                asked = [i for i, (c, _) in enumerate(plan) if c.step and c.step.debug]
                with clock.part("kv"):
                    rows = TimedHybridRows(self._kv, *read, *rest)
                rows.watch_with(clock, asked, self._model_config.num_hidden_layers // 2)
        for context, _ in plan:
            context.shares_tail = False
        return rows

    def end(self) -> None:
        self._kv.close()

    def _opened(self, context: Context) -> None:
        self._kv.open(context.id)
        context.selections = np.full((len(context.tokens), *self._selection_shape), -1, np.int32)
        context.codes = {} if self._report_codes else None
        context.code_bytes = self._kv.layout.warm_block_bytes
        self._turns.begin(context, 0)

    def _closed(self, context: Context) -> None:
        if self._indices is not None:
            self._indices.forget(context.id)
        self._loading.discard(context.id)
        self._turns.forget(context)
        if self.watch is not None:
            self.watch.forget(context.id)
        if self._summaries is not None:
            self._summaries.forget(context.id)
        self._kv.release(context.id)

    # -- for alarms -----------------------------------------------------------------------------

    def cache_state(self) -> CacheState:
        full = self._kv.device.full
        state = super().cache_state()
        return replace(state, hot_total=full.slots.num_blocks * full.slot_nbytes)

    @property
    def expected_saving(self) -> float:
        layout = self._kv.layout
        coded = layout.warm_block_bytes
        return 1 - coded / layout.bf16_bytes(BLOCK) if coded else 0.0

    def shrink_hot(self) -> int:
        return relief.shrink_hot(self._kv, list(self._contexts.values()), self._hybrid, self.watch)

    def demote(self, num_bytes: int) -> int:
        freed = relief.to_cold(self._kv, num_bytes)
        return freed if freed else super().demote(num_bytes)

    def prewarm_summaries(self, limit: int) -> int:
        if self._router is None:
            return 0
        done = 0
        for context in self._contexts.values():
            cold = self._kv.cold_blocks(context.id)
            done += self._router.prepare(context.tokens, cold, limit - done)
        return done

    def skip_summaries(self, skip: bool) -> None:
        whole = self._model_config.attention.hybrid
        # kernels read none
        if whole.summary_weight == 0 or self._kv.config.deterministic:
            return
        self._hybrid = _without_summaries(whole) if skip else whole
        self._through_torch = self._through_plain if skip else self._through_whole

    def warm_up(self, rounds: int) -> int:
        return relief.warm_up(self._kv, rounds)

    def _drop_all(self, context: Context) -> None:
        self._drop(context)

    # -- dropping -------------------------------------------------------------------------------

    def _cut(self, context: Context, length: int) -> None:
        """Keep the KV of the first ``length`` positions, or of none where blocks have turned warm
        that the query after them read in full precision."""
        held = self._kv.summary(context.id).num_tokens
        if held > length:
            config = self._kv.config_of(context.id)
            if warm_end(length + 1, config) != warm_end(held, config):
                length = 0
            self._kv.truncate(context.id, length)
            self._turns.cut(context, length)
            self._forget_codes(context, length)
            held = length
        context.todo = list(range(held, len(context.tokens)))

    def _drop(self, context: Context) -> None:
        self._kv.truncate(context.id, 0)
        self._turns.cut(context, 0)
        self._forget_codes(context, 0)
        self._loading.discard(context.id)
        context.shares_tail = False
        context.todo = list(range(len(context.tokens)))

    def _forget_codes(self, context: Context, length: int) -> None:
        """Of blocks that do not lie in the first ``length`` tokens: they are made again."""
        if context.codes is not None:
            kept = {b: codes for b, codes in context.codes.items() if BLOCK * (b + 1) <= length}
            context.codes = kept
        if self._indices is not None:
            self._indices.forget(context.id)

    def _look_after_loads(self, ctx: ContextId) -> None:
        """Blocks that were lost on their way are computed again, with all the others."""
        if State.LOADING not in self._kv.states(ctx):
            self._loading.discard(ctx)
        if len(self._kv.missing(ctx)):
            self._drop(self._contexts[ctx])

    # -- room -----------------------------------------------------------------------------------

    def _wanted(self, context: Context, positions: list[int]) -> Slots:
        """At most: codes that a fork has made already are not made again."""
        held, length = _held(context), positions[-1] + 1
        full = -(-length // BLOCK) - -(-held // BLOCK) + context.shares_tail
        config = self._kv.config_of(context.id)
        # a zone that has shrunk leaves blocks behind that are coded now
        shrinks = not self._kv.config.deterministic
        was = self._kv.first_full(context.id) if shrinks else warm_end(held, config)
        return full, max(0, warm_end(length, config) - was)

    def _free(self) -> Slots:
        pools, (full, warm) = self._kv.device, self._promised
        return pools.full.slots.num_free - full, pools.warm.slots.num_free - warm

    def _fits(self, wanted: Slots) -> bool:
        full, warm = self._free()
        return wanted[0] <= full and wanted[1] <= warm

    def _relieve(self, context: Context, warm: int) -> None:
        """The oldest warm blocks leave before anything is dropped or refused; the context's own
        come last. Not in deterministic mode."""
        while warm > self._free()[1] and self._kv.relieve(warm - self._free()[1], context.id):
            pass

    def _warm_room(self, context: Context, wanted: int) -> int:
        """Free warm blocks after ``wanted`` of them were tried to be had for ``context``."""
        self._relieve(context, wanted)
        self._reclaim_idle((0, wanted), but=context)
        return self._free()[1]

    def _reclaim_idle(self, wanted: Slots, but: Context) -> None:
        if self._fits(wanted):
            return
        # codes on their way to the cold tier leave when they are written
        self._kv.settle()
        idle = [c for c in self._contexts.values() if c.is_idle and c is not but]
        self._reclaim(sorted(idle, key=lambda c: c.served), wanted)

    def _reclaim(self, victims: Iterable[Context], wanted: Slots) -> None:
        for victim in victims:
            if self._fits(wanted):
                return
            self._drop(victim)

    def _no_room(self, wanted: Slots) -> CapacityError:
        pools, (full, warm) = self._kv.device, self._free()
        return CapacityError(
            f"{wanted[0]} full-precision and {wanted[1]} warm KV blocks wanted, {full} of "
            f"{pools.full.slots.num_blocks} and {warm} of {pools.warm.slots.num_blocks} free; "
            "release contexts or raise engine.num_blocks and engine.num_warm_blocks"
        )


def _held(context: Context) -> int:
    """Positions whose KV is there: the first ones."""
    return context.todo[0] if context.todo else len(context.tokens)


def _without_summaries(config: HybridConfig) -> HybridConfig:
    return config.model_copy(update={"summary_weight": 0.0})
