"""Rows of a batch that is watched: the same bits, and a PartClock that knows the parts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.hybrid import attend_hybrid
from engine.attention.topology import is_dense
from engine.attention.view import LayerView
from engine.light.debug import PartClock
from engine.light.hybrid_rows import HybridRows
from engine.light.paged_rows import PagedRows


class TimedPagedRows(PagedRows):
    """Full attention: everything read is local. The native step reads by itself, in ``other``."""

    clock: PartClock

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with self.clock.part("kv"):
            plan, slots = self._places
            n = len(self.positions)
            self.kv.write(layer, slots, k[:n], v[:n])
        with self.clock.part("local"):
            return self.kv.attend(layer, q, plan)


class TimedHybridRows(HybridRows):
    clock: PartClock
    asked: frozenset[int]
    """Contexts, as numbers in the batch, whose hit rate is wanted."""
    ask_layer: int

    def watch_with(self, clock: PartClock, asked: Sequence[int], ask_layer: int) -> None:
        self.clock, self.asked, self.ask_layer = clock, frozenset(asked), ask_layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(self.order)
        clock = self.clock
        with clock.part("kv"):
            self._kv.write(layer, self._step, k[:n], v[:n])
        if self._summaries is not None:
            with clock.part("summary"):
                self._summaries.learn(layer, self._kv, self._step)
        self._mark_bad(q[:n], k[:n], v[:n])
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        scaled = q.float() * q.shape[-1] ** -0.5
        with clock.asking():
            gather = self._seconds_of_gathering(layer)
            local = self._seconds_without(layer, scaled, out, sparse=True)
            far = None
            if self._summaries is not None:
                far = self._seconds_without(layer, scaled, out, sparse=False)
        began = time.perf_counter()
        self._read(layer, scaled, out)
        whole = time.perf_counter() - began
        clock.parts["kv"] += gather
        clock.parts["local"] += local - gather
        clock.parts["sparse"] += (whole if far is None else far) - local
        clock.parts["summary"] += 0.0 if far is None else whole - far
        if layer == self.ask_layer:
            with clock.asking():
                self._ask_hits(layer, scaled)
        return out

    def _seconds_of_gathering(self, layer: int) -> float:
        began = time.perf_counter()
        for wave in self._waves:
            wave.gather(layer, self._kv.device.full)
        return time.perf_counter() - began

    def _seconds_without(self, layer: int, scaled: Tensor, out: Tensor, *, sparse: bool) -> float:
        """The layer read without summaries, ``sparse``: without retrieved tokens either."""
        kept = (self._config, self._selections, self._watch, self._summaries, self._indices)
        changes: dict[str, object] = {"summary_weight": 0.0}
        if sparse:
            changes["index"] = "none"
            self._indices = None
        if self._through_torch[0]:
            # as what it is compared with
            changes["native"] = "off"
        self._config = self._config.model_copy(update=changes)
        self._selections = torch.full_like(self._selections, -1)
        self._watch = self._summaries = None
        began = time.perf_counter()
        try:
            self._read(layer, scaled, torch.empty_like(out))
            return time.perf_counter() - began
        finally:
            self._config, self._selections, self._watch, self._summaries, self._indices = kept

    def _ask_hits(self, layer: int, scaled: Tensor) -> None:
        """What exact scores would have chosen, for the newest row of those who ask."""
        for wave in self._waves:
            wave.gather(layer, self._kv.device.full)
            for run, rows in wave.runs:
                length, parts = rows[-1]
                newest = self._newest[run.owner] is run and run.owner in self.asked
                if not newest or run.owner in self._bad:
                    continue
                if is_dense(length, self._config.dense_below) or self._config.index == "none":
                    continue
                exact = self._config.model_copy(
                    update={
                        "index": "bf16",
                        "native": "off",
                        "summary_weight": 0.0,
                        "candidates": max(self._config.candidates, length),
                    }
                )
                row = run.row + run.count - 1
                sink_k, sink_v, hot_k, hot_v = (part.contiguous() for part in parts)
                warm = self._warm_of(layer, run)
                view = LayerView(length, sink_k, sink_v, hot_k, hot_v, warm)
                best = attend_hybrid(scaled[row], view, exact, None, 1.0).selected
                assert best is not None, "a sparse row selects"
                self._count(self._selections[row, layer], best)

    def _count(self, found: Tensor, best: Tensor) -> None:
        for mine, theirs in zip(found.flatten(0, 1), best.flatten(0, 1), strict=True):
            wanted = set(theirs[theirs >= 0].tolist())
            self.clock.wanted += len(wanted)
            self.clock.hits += len(wanted.intersection(mine.tolist()))
