"""Sending whole blocks down a tier. Needs the owner's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.errors import CapacityError
from engine.kvcache.cold import ColdTier
from engine.kvcache.device import DeviceTiers
from engine.kvcache.table import WHOLE, ContextBlocks
from engine.kvcache.tiers import State, Tier

MakeRoom = Callable[[int, int, set[str]], bool]
"""(full slots, warm slots, contexts that keep theirs) -> whether anything changed"""


def evict_blocks(
    context: ContextBlocks,
    blocks: Iterable[int],
    device: DeviceTiers,
    cold: ColdTier,
    make_room_for: MakeRoom,
) -> list[int]:
    """Start to send ``blocks`` to the cold tier, full-precision ones through codes; those that
    were sent. CapacityError when there is no slot for codes."""
    chosen = [b for b in blocks if _may_leave(context, b)]
    hot = [b for b in chosen if context.state[b] == State.HOT]
    while (short := len(hot) - device.warm.slots.num_free) > 0:
        if not make_room_for(0, short, {context.id}):
            raise CapacityError(
                f"{len(hot)} blocks need a warm slot on their way to the cold tier, {short} more "
                "than are free; evict fewer at once or raise the number of warm blocks"
            )
    demote(context, hot, device)
    for block in chosen:
        if context.state[block] == State.WARM:
            cold.spill(context, block)
    return chosen


def _may_leave(context: ContextBlocks, block: int) -> bool:
    if block < 1:
        return False
    state = context.state[block]
    return state == State.WARM or (state == State.HOT and context.written[block] == WHOLE)


def demote(context: ContextBlocks, blocks: list[int], device: DeviceTiers) -> None:
    """Code full-precision blocks now, whatever their age; warm slots are free."""
    fresh_full: list[int] = []
    fresh_warm: list[int] = []
    for block in blocks:
        full = int(context.full[block])
        warm = device.twin(full)
        if warm is None:
            (warm,) = device.warm.take(1)
            device.pair(full, warm)
            fresh_full.append(full)
            fresh_warm.append(warm)
        else:
            device.warm.slots.share([warm])
        context.move(block, State.QUANTISING)
        context.warm[block] = warm
    if fresh_full:
        device.code(fresh_full, fresh_warm)
    for block in blocks:
        full, context.full[block] = int(context.full[block]), 0
        context.move(block, State.WARM)
        context.note(block, Tier.WARM)
        device.drop_full([full])


def make_room(
    full: int,
    warm: int,
    victims: list[ContextBlocks],
    device: DeviceTiers,
    cold: ColdTier,
    can_spill: bool,
) -> bool:
    """Under memory pressure: code old full-precision blocks of ``victims``, or send warm ones to
    the cold tier, the longest unused context and its oldest blocks first. Whether anything
    changed."""
    if full > 0 and device.warm.slots.num_free:
        chosen = _oldest(victims, State.HOT, min(full, device.warm.slots.num_free))
        for context, block in chosen:
            demote(context, [block], device)
        return bool(chosen)
    if max(full, warm) <= 0 or not can_spill:
        return False
    chosen = _oldest(victims, State.WARM, max(full, warm))
    for context, block in chosen:
        context.note(block, Tier.COLD)
        cold.spill(context, block)
    return bool(chosen)


def _oldest(
    victims: list[ContextBlocks], state: State, count: int
) -> list[tuple[ContextBlocks, int]]:
    found: list[tuple[ContextBlocks, int]] = []
    for context in victims:
        for block in context.where(state, start=1):
            if len(found) == count:
                return found
            if _may_leave(context, block):
                found.append((context, block))
    return found
