"""ColdTier: warm blocks on their way to records and back, in a thread of its own.

Codes never change once they are made, so a record stays good as long as its block lives: a block
that was fetched back keeps its record ("backing"), and sending it away again moves no byte. A job
holds a reference of the slot it reads or writes. Every method but the jobs needs the owner's lock,
which is ``changed``; a finished job waits in a list until ``apply`` at a step boundary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import structlog

from engine.errors import BlockCorrupt, CapacityError
from engine.kvcache.device import DeviceTiers
from engine.kvcache.record_store import RecordStore
from engine.kvcache.table import ContextBlocks
from engine.kvcache.tiers import State, Tier

RETRY_S = 5.0
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Move:
    """A spill (``serial`` 0 until it is written) or a load, and who waits for it."""

    slot: int
    serial: int = 0
    waiters: list[tuple[ContextBlocks, int]] = field(default_factory=list)
    error: Exception | None = None
    is_done: bool = False


class ColdTier:
    def __init__(
        self, device: DeviceTiers, store: RecordStore, changed: threading.Condition
    ) -> None:
        self._device = device
        self.store = store
        self._changed = changed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-cold")
        self._refs: dict[int, int] = {}
        self._backing: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        self._spilling: dict[int, _Move] = {}
        self._loading: dict[int, _Move] = {}
        self._done: list[Callable[[], bool]] = []
        self._num_ids = 0
        self.why_full = ""
        """What the last spill failed of; no other is tried until a record is freed or RETRY_S have
        passed: a disk that was full for a moment must not end the tier."""
        self._failed_at = 0.0
        self.errors: dict[str, list[BlockCorrupt]] = {}
        """Blocks that were lost, by context; the owner takes them out."""
        device.on_warm_gone = self._forget_backing

    @property
    def is_full(self) -> bool:
        return bool(self.why_full) and time.monotonic() - self._failed_at < RETRY_S

    @property
    def is_writing(self) -> bool:
        """Whether a job is about to free a slot, or has and waits for ``apply``."""
        return any(not move.is_done for move in self._spilling.values())

    @property
    def is_moving(self) -> bool:
        return bool(self._spilling or self._loading)

    # -- down -----------------------------------------------------------------------------------

    def spill(self, context: ContextBlocks, block: int) -> None:
        """WARM -> SPILLING, and COLD once the record is written."""
        if self.is_full:
            return
        slot = int(context.warm[block])
        context.move(block, State.SPILLING)
        if slot in self._backing:
            self._make_cold(context, block, self._backing[slot])
            return
        move = self._spilling.get(slot)
        if move is None:
            move = self._spilling[slot] = _Move(slot)
            self._device.warm.slots.share([slot])
            self._num_ids += 1
            block_id = self._num_ids
            self._start(lambda: self._write(move, block_id, block), self._spilled, move)
        move.waiters.append((context, block))

    def _write(self, move: _Move, block_id: int, position: int) -> None:
        (payload,) = self._device.warm.read([move.slot])
        move.serial = self.store.put(block_id, position, payload)

    def _spilled(self, move: _Move) -> bool:
        if move.serial and move.serial not in self._refs:
            self._refs[move.serial] = 1
            self._backing[move.slot] = move.serial
            self._slot_of[move.serial] = move.slot
        if move.error is None:
            self.why_full = ""
        else:
            self._failed_at = time.monotonic()
            if not self.why_full:
                log.warning("kv_cold_tier_full", error=str(move.error), retry_s=RETRY_S)
            self.why_full = str(move.error)
        self._settle(move, State.SPILLING, self._spilled_one)
        if move.waiters:
            return False
        del self._spilling[move.slot]
        self._device.drop_warm([move.slot])
        return True

    def _spilled_one(self, context: ContextBlocks, block: int, move: _Move) -> None:
        if move.error is not None:
            context.move(block, State.WARM)
        else:
            self._make_cold(context, block, move.serial)

    def _make_cold(self, context: ContextBlocks, block: int, serial: int) -> None:
        on_disk = self.store.is_on_disk(serial)
        context.move(block, State.COLD_DISK if on_disk else State.COLD_HOST)
        self._refs[serial] += 1
        context.record[block] = serial
        slot, context.warm[block] = int(context.warm[block]), 0
        context.kept[block] = False
        self._device.drop_warm([slot])

    # -- up -------------------------------------------------------------------------------------

    def load(self, context: ContextBlocks, block: int) -> None:
        """COLD -> LOADING, and WARM once the record is read and found intact. CapacityError when
        the device has no slot."""
        serial = int(context.record[block])
        slot = self._slot_of.get(serial)
        if slot is not None:
            context.move(block, State.LOADING)
            self._make_warm(context, block, slot)
            return
        move = self._loading.get(serial)
        if move is None:
            (slot,) = self._device.warm.take(1)
            move = self._loading[serial] = _Move(slot, serial)
            self._refs[serial] += 1
            self._start(lambda: self._read(move), self._loaded, move)
        context.move(block, State.LOADING)
        move.waiters.append((context, block))

    def _read(self, move: _Move) -> None:
        payload: np.ndarray = self.store.load(move.serial)
        self._device.warm.restore(move.slot, payload)

    def _loaded(self, move: _Move) -> bool:
        if move.error is None and move.slot not in self._backing:
            self._backing[move.slot] = move.serial
            self._slot_of[move.serial] = move.slot
            self._refs[move.serial] += 1
        self._settle(move, State.LOADING, self._loaded_one)
        if move.waiters:
            return False
        del self._loading[move.serial]
        self._device.drop_warm([move.slot])
        self.unref(move.serial)
        return True

    def _loaded_one(self, context: ContextBlocks, block: int, move: _Move) -> None:
        if move.error is None:
            self._make_warm(context, block, move.slot)
            return
        if not isinstance(move.error, BlockCorrupt):
            raise move.error
        self.errors.setdefault(context.id, []).append(move.error)
        context.forget(block)
        context.note(block, Tier.ABSENT)
        self.unref(move.serial)

    def _make_warm(self, context: ContextBlocks, block: int, slot: int) -> None:
        context.move(block, State.WARM)
        serial, context.record[block] = int(context.record[block]), 0
        context.warm[block] = slot
        context.kept[block] = True
        context.note(block, Tier.WARM)
        self._device.warm.slots.share([slot])
        self.unref(serial)

    # -- both -----------------------------------------------------------------------------------

    def apply(self) -> None:
        """Commit what jobs have finished, except for contexts in a step: theirs waits for its
        end."""
        self._done = [finish for finish in self._done if not finish()]

    def ref(self, serial: int) -> None:
        self._refs[serial] += 1

    def unref(self, serial: int) -> None:
        self._refs[serial] -= 1
        if not self._refs[serial]:
            del self._refs[serial]
            self.store.free(serial)
            self.why_full = ""

    def close(self) -> None:
        """Waits for the job that runs; the owner's lock must not be held."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def _settle(
        self,
        move: _Move,
        state: State,
        finish: Callable[[ContextBlocks, int, _Move], None],
    ) -> None:
        """``finish`` for each waiter that still waits and is not in a step."""
        waiters, move.waiters = move.waiters, []
        for context, block in waiters:
            if not self._waits(context, block, state, move):
                continue
            if context.busy == "a step":
                move.waiters.append((context, block))
            else:
                finish(context, block, move)

    def _waits(self, context: ContextBlocks, block: int, state: State, move: _Move) -> bool:
        if block >= len(context.state) or context.state[block] != state:
            return False
        if state == State.SPILLING:
            return int(context.warm[block]) == move.slot
        return int(context.record[block]) == move.serial

    def _forget_backing(self, slot: int) -> None:
        serial = self._backing.pop(slot, None)
        if serial is not None:
            del self._slot_of[serial]
            self.unref(serial)

    def _start(self, job: Callable[[], None], finish: Callable[[_Move], bool], move: _Move) -> None:
        def run() -> None:
            try:
                job()
            except Exception as error:
                # for the thread that commits: it knows whom this concerns
                move.error = error
            with self._changed:
                move.is_done = True
                self._done.append(lambda: self._finish(finish, move))
                self._changed.notify_all()

        self._executor.submit(run)

    def _finish(self, finish: Callable[[_Move], bool], move: _Move) -> bool:
        if move.error is not None and not isinstance(move.error, CapacityError | OSError):
            raise move.error
        return finish(move)
