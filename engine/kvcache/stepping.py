"""Steps: what a step takes before it computes, and what it commits after. Needs the owner's lock
but for ``write``, which touches only slots that the step's contexts hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidStateError
from engine.kvcache.cold import ColdTier
from engine.kvcache.device import DeviceTiers
from engine.kvcache.quantise import BLOCK
from engine.kvcache.step import Coding, Step, StepView
from engine.kvcache.table import WHOLE, ContextBlocks, written_bits
from engine.kvcache.tiers import State, cold_end, warm_end


@dataclass(frozen=True, slots=True)
class Plan:
    """What one context's rows need: blocks that begin, that are copied because another context
    shares them, and that turn warm."""

    context: ContextBlocks
    positions: np.ndarray
    length: int
    begins: list[int]
    copies: list[int]
    codes: list[int]


class Steps:
    def __init__(self, device: DeviceTiers, cold: ColdTier) -> None:
        self._device = device
        self._cold = cold

    def plan(self, context: ContextBlocks, positions: Sequence[int] | np.ndarray) -> Plan:
        """InvalidStateError when a row is written already or its block is not in full precision."""
        rows = np.asarray(positions, np.int64)
        assert rows.ndim == 1 and (np.diff(rows) > 0).all() and (rows >= 0).all(), (
            f"context {context.id}: positions must rise"
        )
        length = max(context.length, int(rows[-1]) + 1 if len(rows) else 0)
        context.reserve(-(-length // BLOCK))
        begins: list[int] = []
        copies: list[int] = []
        new_bits: dict[int, np.uint32] = {}
        for block in np.unique(rows // BLOCK).tolist():
            bits = written_bits(rows[rows // BLOCK == block] % BLOCK)
            state = context.state[block]
            if state not in (State.ABSENT, State.HOT) or context.written[block] & bits:
                raise InvalidStateError(
                    f"context {context.id}: rows of block {block} are cached already "
                    f"({State(state).name}); evict the block before it is computed again"
                )
            new_bits[block] = bits
            if state == State.ABSENT:
                begins.append(block)
            elif self._device.full.slots.references(int(context.full[block])) > 1:
                copies.append(block)
        return Plan(context, rows, length, begins, copies, self._codes(context, length, new_bits))

    def _codes(
        self, context: ContextBlocks, length: int, new_bits: dict[int, np.uint32]
    ) -> list[int]:
        """Blocks that turn warm in the step: whole after it, and old enough."""
        end = warm_end(length, context.config)
        written = context.written[:end].copy()
        for block, bits in new_bits.items():
            if block < end:
                written[block] |= bits
        state = context.state[:end]
        full = (state == State.HOT) | (state == State.ABSENT)
        found = np.flatnonzero(full & (written == WHOLE))
        return found[found >= 1].tolist()

    def shortage(self, plans: list[Plan]) -> tuple[int, int]:
        """Slots that the plans want and the pools do not have: full, warm."""
        full = sum(len(plan.begins) + len(plan.copies) for plan in plans)
        warm: set[tuple[str, int]] = set()
        for plan in plans:
            for block in plan.codes:
                slot = int(plan.context.full[block])
                if block in plan.begins or block in plan.copies or not slot:
                    warm.add((plan.context.id, block))
                elif self._device.twin(slot) is None:
                    warm.add(("", slot))
        pools = self._device
        return full - pools.full.slots.num_free, len(warm) - pools.warm.slots.num_free

    def begin(self, plans: list[Plan]) -> Step:
        """The pools have room, see ``shortage``."""
        created: list[tuple[ContextBlocks, int]] = []
        for plan in plans:
            context = plan.context
            for block, slot in zip(
                plan.begins, self._device.full.take(len(plan.begins)), strict=True
            ):
                context.full[block] = slot
                context.move(block, State.HOT)
                created.append((context, block))
            self._own_rows(plan)
            context.busy = "a step"
        views = [self._view(plan) for plan in plans]
        coding = self._coding(plans, views)
        slots = [v.full[v.positions // BLOCK] for v in views]
        offsets = [v.positions % BLOCK for v in views]
        empty = np.zeros(0, np.int64)
        rows = self._device.full.rows(
            np.concatenate([*slots, empty]), np.concatenate([*offsets, empty])
        )
        return Step(views, rows, coding, created)

    def _own_rows(self, plan: Plan) -> None:
        """Copy on write."""
        context = plan.context
        for block in np.unique(plan.positions // BLOCK).tolist():
            slot = int(context.full[block])
            if self._device.full.slots.references(slot) > 1:
                (copy,) = self._device.full.take(1)
                self._device.full.copy(slot, copy)
                context.full[block] = copy
                self._device.drop_full([slot])
            else:
                self._device.unpair(slot)

    def _view(self, plan: Plan) -> StepView:
        context, size = plan.context, -(-plan.length // BLOCK)
        warm = context.warm[:size].copy()
        # on its way out: when it is gone depends on a thread, so it is gone now
        warm[context.state[:size] == State.SPILLING] = 0
        return StepView(
            context,
            plan.positions,
            plan.length,
            context.full[:size].copy(),
            warm,
            context.kept[:size].copy(),
            context.config,
        )

    def _coding(self, plans: list[Plan], views: list[StepView]) -> Coding:
        moves: list[tuple[StepView, int, int, int]] = []
        fresh: dict[int, int] = {}
        owners: dict[int, list[str]] = {}
        warm_pool = self._device.warm
        for plan, view in zip(plans, views, strict=True):
            for block in plan.codes:
                full = int(plan.context.full[block])
                warm = self._device.twin(full) or fresh.get(full)
                if warm is None:
                    (warm,) = warm_pool.take(1)
                    fresh[full] = warm
                else:
                    warm_pool.slots.share([warm])
                owners.setdefault(full, []).append(plan.context.id)
                plan.context.move(block, State.QUANTISING)
                view.warm[block] = warm
                moves.append((view, block, full, warm))
        return Coding(
            moves,
            torch.tensor(list(fresh), dtype=torch.int64),
            torch.tensor(list(fresh.values()), dtype=torch.int64),
            [owners[full] for full in fresh],
        )

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor | None) -> None:
        """Store the step's rows, k [N, G, D], v [N, G, V], then code what turns warm."""
        assert step.is_open, "the step has ended"
        self._device.full.write(layer, step.rows, k, v)
        coding = step.coding
        if len(coding.fresh_full):
            for index in self._device.code_layer(layer, coding.fresh_full, coding.fresh_warm):
                step.failed.update(coding.owners[index])

    def end(self, step: Step, epoch: int) -> None:
        step.is_open = False
        for view, block, full, warm in step.coding.moves:
            context = view.context
            context.full[block] = 0
            context.warm[block] = self._shared_codes(full, warm)
            context.move(block, State.WARM)
            self._device.drop_full([full])
        for view in step.views:
            context, positions = view.context, view.positions
            cold_before = cold_end(context.length, context.config)
            np.bitwise_or.at(
                context.written,
                positions // BLOCK,
                np.uint32(1) << (positions % BLOCK).astype(np.uint32),
            )
            context.length = view.length
            context.served = epoch
            context.busy = ""
            old = np.unique(positions // BLOCK)
            # computed again although cold: somebody asked for it
            context.kept[old[(old >= 1) & (old < cold_before)]] = True
            end = cold_end(view.length, context.config)
            for block in context.where(State.WARM, start=1, stop=end):
                if not context.kept[block]:
                    self._cold.spill(context, block)

    def _shared_codes(self, full: int, warm: int) -> int:
        """The slot to keep: others may have coded the same full slot in the meantime."""
        twin = self._device.twin(full)
        if twin is None:
            if self._device.full.slots.references(full) > 1:
                self._device.pair(full, warm)
            return warm
        if twin != warm:
            self._device.warm.slots.share([twin])
            self._device.drop_warm([warm])
        return twin

    def abort(self, step: Step) -> None:
        """As if the step had not begun."""
        step.is_open = False
        # masked from now on, but 0 * NaN is NaN
        pool = self._device.full
        for tensor in pool.keys + pool.values:
            tensor.view(-1, tensor.shape[3]).index_fill_(0, step.rows, 0.0)
        for view, block, _, warm in step.coding.moves:
            view.context.move(block, State.HOT)
            self._device.drop_warm([warm])
        for context, block in step.created:
            self._device.drop_full([int(context.full[block])])
            context.forget(block)
        for view in step.views:
            view.context.busy = ""
