"""Fetching cold blocks back. Needs the owner's lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import BlockCorrupt, InvalidStateError
from engine.kvcache.cold import ColdTier
from engine.kvcache.config import RewarmPolicy as RewarmPolicy
from engine.kvcache.quantise import BLOCK
from engine.kvcache.table import ContextBlocks
from engine.kvcache.tiers import State, Tier

_COLD = (State.COLD_HOST, State.COLD_DISK)


@dataclass(frozen=True, slots=True)
class Rewarmed:
    """Blocks by what became of them: ``loaded`` can be read, ``pending`` arrive at a later step
    boundary, ``lost`` failed their check and are missing; ``errors`` say how."""

    loaded: tuple[int, ...]
    pending: tuple[int, ...]
    lost: tuple[int, ...]
    errors: tuple[BlockCorrupt, ...]


def request(
    context: ContextBlocks,
    start: int,
    end: int,
    cold: ColdTier,
    make_room: Callable[[int, str], None],
) -> list[int]:
    """Start to load the cold blocks of [start, end); these, and those already on their way."""
    if not 0 <= start <= end <= context.length:
        raise InvalidStateError(
            f"rewarm [{start}, {end}) of a context of {context.length} tokens; expected "
            "0 <= start <= end <= length"
        )
    first = start // BLOCK
    last = -(-end // BLOCK) if end > start else first
    for block in context.where(State.SPILLING, State.WARM, start=first, stop=last):
        if context.state[block] == State.SPILLING:
            # still here: it need not travel
            context.move(block, State.WARM)
        if not context.kept[block]:
            context.kept[block] = True
            context.note(block, Tier.WARM)
    make_room(len(context.where(*_COLD, start=first, stop=last)), context.id)
    # what made room may have sent more of them down, or brought some up
    for block in context.where(*_COLD, start=first, stop=last):
        cold.load(context, block)
    return context.where(State.WARM, State.LOADING, start=first, stop=last)


def result(
    context: ContextBlocks, wanted: list[int], cold: ColdTier, policy: RewarmPolicy
) -> Rewarmed:
    """BlockCorrupt under wait_complete when a block was lost."""
    errors = tuple(cold.errors.pop(context.id, ()))
    if errors and policy == "wait_complete":
        raise errors[0]

    def those(state: State) -> tuple[int, ...]:
        return tuple(b for b in wanted if context.state[b] == state)

    return Rewarmed(those(State.WARM), those(State.LOADING), those(State.ABSENT), errors)
