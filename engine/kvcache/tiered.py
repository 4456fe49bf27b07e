"""TieredKV: the cache of one model in three tiers, for many contexts.

A step is ``begin_step`` (takes slots, freezes its contexts), ``write`` for each layer, reading
through its views, and ``end_step``; in between its contexts refuse everything else. A block changes
its tier at the end of a step only, for everybody who asks later. Contexts are named by strings;
tokens are the caller's business.

Thread-safe: several threads may step different contexts at the same time. In ``deterministic`` mode
what a step reads depends on position and length alone, plus the ``events`` of calls to ``rewarm``
and ``evict``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.errors import (
    CapacityError,
    ContextLost,
    EngineError,
    InvalidStateError,
    NotSupportedError,
)
from engine.kvcache.cold import ColdTier
from engine.kvcache.config import TierConfig
from engine.kvcache.device import DeviceTiers
from engine.kvcache.eviction import demote, evict_blocks, make_room
from engine.kvcache.layout import CacheLayout, HeldBytes
from engine.kvcache.pools import Device
from engine.kvcache.prefix import model_hash
from engine.kvcache.quantise import BLOCK
from engine.kvcache.record_store import RecordStore
from engine.kvcache.rewarming import Rewarmed, RewarmPolicy, request, result
from engine.kvcache.step import LayerRead, Step, StepView
from engine.kvcache.stepping import Steps
from engine.kvcache.table import WHOLE, ContextBlocks, TierEvent, runs_of
from engine.kvcache.tiers import State, Tier, warm_end
from engine.runtime.types import EvictResult, KVSummary

DEADLINE_S = 300.0
"""A disk that takes longer for one block is broken."""
Batch = Sequence[tuple[str, Sequence[int] | np.ndarray]]
"""Contexts and the rising positions of their rows; none: the step only reads."""


class TieredKV:
    """``num_full``, ``num_warm``: slots of the pools. ``model_id`` names model and weights in cold
    records. ``dtype`` of the full-precision pool must have ``layout.full_bytes`` bytes."""

    def __init__(
        self,
        layout: CacheLayout,
        config: TierConfig,
        *,
        num_full: int,
        num_warm: int,
        model_id: str,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
    ) -> None:
        assert layout.profile == config.profile, f"{layout.profile} is not {config.profile}"
        self.layout = layout
        self.config = config
        self.epoch = 0
        """Steps that have ended."""
        self.device = DeviceTiers(layout, num_full, num_warm, dtype, device, config.debug_nan)
        self._changed = threading.Condition()
        host_bytes = 0 if config.cold == "off" else config.host_bytes
        directory = config.directory if config.cold == "disk" else None
        store = RecordStore(model_hash(model_id), layout.record_bytes, host_bytes, directory)
        self._cold = ColdTier(self.device, store, self._changed)
        self._steps = Steps(self.device, self._cold)
        self._contexts: dict[str, ContextBlocks] = {}

    # -- account --------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Of the pools' tensors."""
        return self.device.allocated_bytes

    @property
    def used_bytes(self) -> int:
        """Of slots in use, counted once however many contexts share them."""
        with self._changed:
            return self.device.used_bytes

    def held_bytes(self) -> HeldBytes:
        """By tier; what is cold lies in host memory or on disk."""
        with self._changed:
            return self.device.held_bytes(self.host_bytes + self.disk_bytes)

    @property
    def host_bytes(self) -> int:
        return self._cold.store.host_bytes

    @property
    def disk_bytes(self) -> int:
        return self._cold.store.disk_bytes

    @property
    def cold_problem(self) -> str:
        """Why nothing goes cold at the moment; empty while it does."""
        return self._cold.why_full

    @property
    def store(self) -> RecordStore:
        return self._cold.store

    def summary(self, ctx: str) -> KVSummary:
        """Account of a context. InvalidStateError during a step."""
        with self._changed:
            return self._idle(ctx, "get_kv_summary").summary(self.layout)

    def states(self, ctx: str) -> list[State]:
        """Of each block."""
        with self._changed:
            self._cold.apply()
            context = self._idle(ctx, "states")
            found = [State(s) for s in context.state[: context.num_blocks].tolist()]
            for block, state in enumerate(found):
                if state == State.COLD_HOST and self.store.is_on_disk(int(context.record[block])):
                    found[block] = State.COLD_DISK
            return found

    def record_serial(self, ctx: str, block: int) -> int:
        """Serial of a cold block's record in ``store``, 0 when it has none."""
        with self._changed:
            return int(self._idle(ctx, "record_serial").record[block])

    def events(self, ctx: str) -> tuple[TierEvent, ...]:
        """Changes of tier that position and length do not explain."""
        with self._changed:
            return tuple(self._idle(ctx, "events").events)

    def cold_blocks(self, ctx: str) -> list[int]:
        """Blocks that are not on the device and not on their way to it, rising."""
        with self._changed:
            context = self._idle(ctx, "cold_blocks")
            return context.where(State.SPILLING, State.COLD_HOST, State.COLD_DISK)

    def first_full(self, ctx: str) -> int:
        """First block after the last one that is not in full precision, at least 1."""
        with self._changed:
            return self._idle(ctx, "first_full").first_full()

    def config_of(self, ctx: str) -> TierConfig:
        """With the context's own hot zone, see ``set_hot``."""
        with self._changed:
            return self._idle(ctx, "config_of").config

    def missing(self, ctx: str) -> np.ndarray:
        """Positions that must be computed (again): never written, evicted, or lost; int64."""
        with self._changed:
            return self._idle(ctx, "missing").missing()

    # -- contexts -------------------------------------------------------------------------------

    def open(self, ctx: str) -> None:
        with self._changed:
            if ctx in self._contexts:
                raise InvalidStateError(f"context {ctx} exists; release it first")
            self._contexts[ctx] = ContextBlocks(ctx, self.config)

    def fork(self, parent: str, child: str) -> None:
        """The child shares every block; who writes to a shared one first gets a copy."""
        with self._changed:
            self._cold.apply()
            source = self._idle(parent, "fork")
            if child in self._contexts:
                raise InvalidStateError(f"context {child} exists; release it first")
            context = source.copy(child)
            self.device.full.slots.share(context.full[context.full > 0].tolist())
            self.device.warm.slots.share(context.warm[context.warm > 0].tolist())
            for serial in context.record[context.record > 0].tolist():
                self._cold.ref(serial)
            self._contexts[child] = context
            for block in context.where(State.SPILLING):
                context.move(block, State.WARM)
                self._cold.spill(context, block)
            for block in context.where(State.LOADING):
                context.move(block, State.COLD_HOST)

    def release(self, ctx: str) -> None:
        """A context in a step goes when the step ends."""
        with self._changed:
            context = self._contexts.get(ctx)
            if context is None:
                return
            context.closing = True
            self._close_if_idle(context)

    def truncate(self, ctx: str, length: int) -> None:
        """Forget tokens from ``length`` on. A coded block that would be cut is forgotten whole,
        see ``missing``."""
        with self._changed:
            context = self._idle(ctx, "truncate")
            if not 0 <= length <= context.length:
                raise InvalidStateError(
                    f"truncate context {ctx} of {context.length} tokens to {length}; expected "
                    "fewer, not less than 0"
                )
            block, offset = divmod(length, BLOCK)
            if offset and context.state[block] == State.HOT:
                context.written[block] &= np.uint32((1 << offset) - 1)
                block += 1
            for gone in range(block, context.num_blocks):
                self._drop(context, gone)
            context.length = length

    def set_hot(self, ctx: str, hot: int) -> None:
        """A hot zone of this context's own from its next step on. What is coded stays coded, so a
        longer zone fills up as the context grows. NotSupportedError in deterministic mode."""
        if self.config.deterministic:
            raise NotSupportedError(
                f"hot = {hot} for context {ctx} in deterministic mode, where tiers depend on "
                "position and length only; set deterministic = false"
            )
        with self._changed:
            context = self._idle(ctx, "set_hot")
            context.config = TierConfig.model_validate(self.config.model_dump() | {"hot": hot})

    def code_old(self, ctx: str) -> int:
        """Code whole blocks that are older than the context's hot zone now, not in its next step,
        while there are warm slots; how many. NotSupportedError in deterministic mode."""
        if self.config.deterministic:
            raise NotSupportedError("code_old in deterministic mode, where steps alone code blocks")
        with self._changed:
            context = self._idle(ctx, "code_old")
            end = warm_end(context.length, context.config)
            old = context.where(State.HOT, start=1, stop=end)
            whole = [b for b in old if context.written[b] == WHOLE]
            chosen = whole[: self.device.warm.slots.num_free]
            demote(context, chosen, self.device)
            return len(chosen)

    def evict(
        self, ctx: str, start: int, end: int, to: Literal["cold", "absent"] = "absent"
    ) -> EvictResult:
        """Whole blocks that hold any token of [start, end). cold: the sink and blocks that are not
        whole stay where they are; waits until the records are written. absent: they are
        ``missing`` afterwards. ``freed_bytes`` on the device."""
        with self._changed:
            self._cold.apply()
            context = self._idle(ctx, "evict_kv")
            if not 0 <= start <= end <= context.length:
                raise InvalidStateError(
                    f"evict_kv [{start}, {end}) of a context of {context.length} tokens; expected "
                    "0 <= start <= end <= length"
                )
            if to == "cold" and self.config.cold == "off":
                raise NotSupportedError("evict_kv to 'cold', but cold = 'off'; set host or disk")
            wanted = range(start // BLOCK, -(-end // BLOCK) if end > start else start // BLOCK)
            freed = {b: self._own_bytes(context, b) for b in wanted}
            if to == "absent":
                gone = [b for b in wanted if context.state[b] != State.ABSENT]
                for block in gone:
                    self._drop(context, block)
                    context.note(block, Tier.ABSENT)
            else:
                gone = self._evict_to_cold(context, wanted)
            ranges = ((b * BLOCK, min((b + 1) * BLOCK, context.length)) for b in gone)
            return EvictResult(tuple(ranges), freed_bytes=sum(freed[b] for b in gone))

    def rewarm(
        self,
        ctx: str,
        start: int,
        end: int,
        policy: RewarmPolicy = "wait_complete",
        timeout_s: float = 30.0,
    ) -> Rewarmed:
        """Bring cold blocks that hold any token of [start, end) back to codes on the device, to
        the bit. best_effort: they arrive at later step boundaries. wait_complete: all are there or
        BlockCorrupt is raised, and the lost ones are ``missing``. timeout: waits ``timeout_s`` at
        most, the rest arrives later. CapacityError when the device has no room."""
        if self.config.deterministic and policy != "wait_complete":
            raise NotSupportedError(
                f"rewarm policy {policy!r} in deterministic mode: when blocks arrive would depend "
                "on a thread; use wait_complete"
            )
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._cold.apply()
            context = self._idle(ctx, "rewarm")
            wanted = request(context, start, end, self._cold, self._room_for_loads)
            context.busy = "a move between tiers"
            try:
                while policy != "best_effort" and any(
                    context.state[b] == State.LOADING for b in wanted
                ):
                    left = deadline - time.monotonic() if policy == "timeout" else None
                    if left is not None and left <= 0:
                        break
                    self._wait(left)
            finally:
                context.busy = ""
                self._close_if_idle(context)
            return result(context, wanted, self._cold, policy)

    def replay(self, ctx: str, events: Sequence[TierEvent]) -> None:
        """Move blocks as these earlier events of the context did, for one that is computed again;
        they are on record already. Errors of ``rewarm`` and ``evict``."""
        noted = self.events(ctx)
        for tier, start, end in runs_of(events):
            if tier == Tier.WARM:
                self.rewarm(ctx, start, end)
            elif tier == Tier.COLD:
                self.evict(ctx, start, end, "cold")
        with self._changed:
            self._idle(ctx, "replay").events[:] = noted

    def relieve(self, num_warm: int, last: str) -> bool:
        """Under memory pressure: send ``num_warm`` warm blocks to the cold tier, the longest unused
        context's oldest first and those of ``last`` last. Whether anything changed; nothing does in
        deterministic mode or without a cold tier. May wait."""
        with self._changed:
            self._cold.apply()
            return self._make_room(0, num_warm, set(), {last})

    def settle(self) -> None:
        """Wait until nothing is on its way between the tiers, and commit it."""
        with self._changed:
            self._cold.apply()
            while self._cold.is_moving and not any(c.busy for c in self._contexts.values()):
                self._wait()

    def close(self) -> None:
        self._cold.close()

    # -- steps ----------------------------------------------------------------------------------

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Step]:
        """begin_step, then end_step, or abort_step when the body raises."""
        step = self.begin_step(batch)
        try:
            yield step
        except BaseException:
            self.abort_step(step)
            raise
        self.end_step(step)

    def begin_step(self, batch: Batch) -> Step:
        """CapacityError and InvalidStateError leave everything as it was."""
        with self._changed:
            self._cold.apply()
            names = [ctx for ctx, _ in batch]
            assert len(set(names)) == len(names), f"a context is twice in {names}"
            while True:
                plans = [self._steps.plan(self._idle(c, "step"), rows) for c, rows in batch]
                short = self._steps.shortage(plans)
                if max(short) <= 0:
                    break
                spared = set(names) if short[0] > 0 else set[str]()
                if not self._make_room(*short, spared, set(names)):
                    raise self._no_room(*short)
            return self._steps.begin(plans)

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor | None = None) -> None:
        """Rows k [N, G, D], v [N, G, V] in the batch's order (v is not looked at in latent
        attention). Call it once for each layer, before the layer is read."""
        self._steps.write(layer, step, k, v)

    def read(self, layer: int, view: StepView, t: int | None = None) -> LayerRead:
        """What a query of context length t (default: the newest) reads of one context."""
        tiers, slots = view.tiers(view.length if t is None else t)
        full, warm = np.flatnonzero(tiers == Tier.FULL), np.flatnonzero(tiers == Tier.WARM)
        pools = self.device
        return LayerRead(
            torch.from_numpy(full),
            torch.from_numpy(slots[full].astype(np.int64)),
            pools.full.keys[layer],
            pools.full.values[layer] if pools.full.values else None,
            torch.from_numpy(warm),
            torch.from_numpy(slots[warm].astype(np.int64)),
            pools.warm.keys[layer] if pools.warm.keys else None,
            pools.warm.values[layer] if pools.warm.values else None,
        )

    def end_step(self, step: Step) -> None:
        """Commit: new tiers are visible from here on, old slots are given back."""
        with self._changed:
            self.epoch += 1
            self._steps.end(step, self.epoch)
            self._after(step)

    def abort_step(self, step: Step) -> None:
        """As if it had not begun."""
        with self._changed:
            self._steps.abort(step)
            self._after(step)

    # -- inside ---------------------------------------------------------------------------------

    def _after(self, step: Step) -> None:
        for view in step.views:
            self._close_if_idle(view.context)
        self._cold.apply()
        self._changed.notify_all()

    def _wait(self, seconds: float | None = None) -> None:
        """Until a job or a step ends, or ``seconds`` have passed; then commit."""
        if not self._changed.wait(DEADLINE_S if seconds is None else seconds) and seconds is None:
            raise EngineError(
                f"the thread that moves cold KV blocks has been silent for {DEADLINE_S} s; is the "
                f"disk of {self.config.directory} stuck?"
            )
        self._cold.apply()

    def _idle(self, ctx: str, action: str) -> ContextBlocks:
        context = self._contexts.get(ctx)
        if context is None or context.closing:
            raise ContextLost(f"{action}: the cache has no context {ctx}; open it first")
        if context.busy:
            raise InvalidStateError(
                f"{action}: context {ctx} is running {context.busy}; wait until it ends"
            )
        return context

    def _close_if_idle(self, context: ContextBlocks) -> None:
        if context.closing and not context.busy and self._contexts.get(context.id) is context:
            for block in context.where(*(s for s in State if s != State.ABSENT)):
                self._drop(context, block)
            del self._contexts[context.id]
            self._cold.errors.pop(context.id, None)

    def _drop(self, context: ContextBlocks, block: int) -> None:
        full, warm = int(context.full[block]), int(context.warm[block])
        record = int(context.record[block])
        context.forget(block)
        self.device.drop_full([full] if full else [])
        self.device.drop_warm([warm] if warm else [])
        if record:
            self._cold.unref(record)

    def _own_bytes(self, context: ContextBlocks, block: int) -> int:
        """Device bytes of a block that no other context holds."""
        full, warm = int(context.full[block]), int(context.warm[block])
        pools, layout = self.device, self.layout
        own_full = full and pools.full.slots.references(full) == 1
        own_warm = warm and pools.warm.slots.references(warm) == 1
        return (layout.full_block_bytes if own_full else 0) + (
            layout.warm_block_bytes if own_warm else 0
        )

    def _evict_to_cold(self, context: ContextBlocks, wanted: range) -> list[int]:
        chosen = evict_blocks(context, wanted, self.device, self._cold, self._make_room)
        context.busy = "a move between tiers"
        try:
            while any(context.state[b] == State.SPILLING for b in chosen):
                self._wait()
        finally:
            context.busy = ""
            self._close_if_idle(context)
        cold = (State.COLD_HOST, State.COLD_DISK)
        gone = [b for b in chosen if context.state[b] in cold]
        for block in gone:
            context.note(block, Tier.COLD)
        return gone

    def _room_for_loads(self, num_warm: int, ctx: str) -> None:
        while (short := num_warm - self.device.warm.slots.num_free) > 0:
            if not self._make_room(0, short, {ctx}):
                raise self._no_room(0, short)

    def _make_room(
        self, full: int, warm: int, spared: set[str], last: set[str] | frozenset[str] = frozenset()
    ) -> bool:
        """Try to free slots, those of ``last`` after all others' and none of ``spared``; whether
        anything changed. May wait, so look again after it."""
        if self._cold.is_writing and (warm > 0 or not self.device.warm.slots.num_free):
            self._wait()
            return True
        if self.config.deterministic:
            return False
        victims = [c for c in self._contexts.values() if not c.busy and c.id not in spared]
        victims.sort(key=lambda context: (context.id in last, context.served))
        can_spill = self.config.cold != "off" and not self._cold.is_full
        return make_room(full, warm, victims, self.device, self._cold, can_spill)

    def _no_room(self, full: int, warm: int) -> CapacityError:
        what = f"{full} full-precision" if full > 0 else f"{warm} warm"
        why = self._cold.why_full
        host = f"; nothing goes cold either: {why}" if why else ""
        return CapacityError(
            f"{what} KV blocks more are wanted than are free ({self.device.full.slots.num_blocks} "
            f"full, {self.device.warm.slots.num_blocks} warm in all){host}; release contexts or "
            "raise the number of blocks"
        )
