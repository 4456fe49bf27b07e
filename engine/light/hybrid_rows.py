"""HybridRows: one batch through TieredKV, a query row at a time.

Shapes: N rows, A query heads, G key-value heads, P = A / G, D key size, V value size, K far tokens
a head. A row reads what its position decides, in the order of positions, with the same calls
whatever else is in the batch: that is what keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import native
from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.topology import SINK, is_dense
from engine.attention.view import LayerView, WarmBlocks
from engine.errors import NotSupportedError
from engine.kvcache.quantise import BLOCK
from engine.kvcache.step import StepView
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import Tier, warm_end
from engine.light.rows import Reads

Through = tuple[bool, bool]
"""Whether sparse and dense rows go through torch instead of native code."""


def through_torch(kv: TieredKV, config: HybridConfig) -> Through:
    """Asked once, when an engine starts, so that the compiler does not run in its first step.
    NotSupportedError when native = "require" cannot be kept."""
    full, warm = kv.device.full, kv.device.warm
    key, width = full.keys[0][0], kv.layout.value_dim
    value = full.values[0][0] if full.values else key[..., :width]
    block = None
    if warm.keys:
        one, first = torch.tensor([1]), torch.tensor([0])
        block = WarmBlocks(warm.keys[0], warm.values[0] if warm.values else None, one, first)
    length = 3 * BLOCK
    view = LayerView(length, key, value, key, value, block)
    answers: list[bool] = []
    for dense_below in (0, length):
        if config.native == "off":
            answers.append(True)
            continue
        reason = native.why_not(view, config.model_copy(update={"dense_below": dense_below}))
        if reason and config.native == "require":
            raise NotSupportedError(
                f"attention.hybrid.native='require', but {reason}; set it to 'auto'"
            )
        answers.append(reason is not None)
    return answers[0], answers[1]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring rows of one context that see the same warm blocks.

    row: of the batch, of the first one, whose context length is ``first``; blocks int64 [G * n]:
    full-precision blocks of the last one, sink first, as places in the pool seen as [S * G];
    warm_blocks, warm_slots int64 [W].
    """

    owner: int
    row: int
    first: int
    count: int
    hot_start: int
    blocks: Tensor
    warm_blocks: Tensor
    warm_slots: Tensor


class HybridRows:
    """CacheRows over TieredKV."""

    def __init__(
        self,
        kv: TieredKV,
        config: HybridConfig,
        selection_shape: tuple[int, ...],
        through_torch: Through,
        batch: Sequence[tuple[str, list[int]]],
    ) -> None:
        """``batch``: contexts with rising positions, without a gap; selection_shape: layers, G,
        P | 1, K."""
        self._kv = kv
        self._batch = batch
        # a context no longer than the sink has no far tokens: the same tokens are read
        dense_below = max(config.dense_below, SINK)
        self._config = config.model_copy(update={"dense_below": dense_below})
        self._bad: set[int] = set()
        """Contexts that wrote NaN or infinity: nothing is read of them any more."""
        self._through_torch = through_torch
        self._step = self._kv.begin_step(self._batch)
        self._runs = list(self._all_runs())
        last = self._runs[-1]
        num_rows = last.row + last.count
        self.order = np.arange(num_rows)
        self._owners = np.repeat([r.owner for r in self._runs], [r.count for r in self._runs])
        self._selections = torch.full((num_rows, *selection_shape), -1, dtype=torch.int32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(self.order)
        self._kv.write(layer, self._step, k[:n], v[:n])
        self._mark_bad(q[:n], k[:n], v[:n])
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        for run in self._runs:
            if run.owner in self._bad:
                out[run.row : run.row + run.count] = torch.nan
            else:
                self._attend_run(layer, run, q, v.shape[2], out)
        return out

    def finish(self) -> Reads:
        self._kv.end_step(self._step)
        warm = np.concatenate([np.full(r.count, BLOCK * len(r.warm_blocks)) for r in self._runs])
        failed = self._step.failed
        bad = self._bad | {i for i, (ctx, _) in enumerate(self._batch) if ctx in failed}
        selections = self._selections.numpy()
        return Reads(
            selections, warm, _distinct(selections[:, 0]), np.isin(self._owners, list(bad))
        )

    # -- the plan, the same in every layer ------------------------------------------------------

    def _all_runs(self) -> Iterator[_Run]:
        row = 0
        for owner, view in enumerate(self._step.views):
            for run in self._runs_of(owner, row, view):
                yield run
                row += run.count

    def _runs_of(self, owner: int, row: int, view: StepView) -> Iterator[_Run]:
        first, last = int(view.positions[0]) + 1, int(view.positions[-1]) + 1
        assert last - first == len(view.positions) - 1, f"rows of {view.context.id} have a gap"
        config = view.config
        while first <= last:
            # the length at which the next block turns warm
            stop = config.hot + BLOCK * (warm_end(first, config) + 1) - 1
            stop = first + BLOCK - 1 if config.profile == "full" else stop
            stop = min(last, stop, first + BLOCK - 1)
            yield self._run(owner, row, view, first, stop)
            row += stop - first + 1
            first = stop + 1

    def _run(self, owner: int, row: int, view: StepView, first: int, last: int) -> _Run:
        tier, slot = view.tiers(last)
        hot_from = 1 + int(np.max(np.flatnonzero(tier != Tier.FULL), initial=0))
        hidden = np.flatnonzero(tier[1:hot_from] == Tier.FULL)
        assert tier[0] == Tier.FULL and not len(hidden), "full precision is at both ends only"
        slots = np.concatenate([slot[:1], slot[hot_from:]]).astype(np.int64)
        groups = self._kv.layout.heads
        warm = np.flatnonzero(tier == Tier.WARM)
        return _Run(
            owner,
            row,
            first,
            last - first + 1,
            BLOCK * hot_from,
            torch.from_numpy((slots * groups + np.arange(groups)[:, None]).flatten()),
            torch.from_numpy(warm),
            torch.from_numpy(slot[warm].astype(np.int64)),
        )

    # -- a layer --------------------------------------------------------------------------------

    def _mark_bad(self, *rows: Tensor) -> None:
        finite = torch.stack([x.flatten(1).isfinite().all(dim=1) for x in rows]).all(dim=0)
        if not finite.all():
            self._bad.update(self._owners[~finite.numpy()].tolist())

    def _attend_run(self, layer: int, run: _Run, q: Tensor, value_dim: int, out: Tensor) -> None:
        pools = self._kv.device
        keys = self._gather(pools.full.keys[layer], run)
        has_values = bool(pools.full.values)
        values = self._gather(pools.full.values[layer], run) if has_values else keys
        warm = None
        if len(run.warm_blocks):
            coded = pools.warm.values[layer] if pools.warm.values else None
            warm = WarmBlocks(pools.warm.keys[layer], coded, run.warm_blocks, run.warm_slots)
        for i in range(run.count):
            t, row = run.first + i, run.row + i
            sink, hot = slice(0, min(SINK, t)), slice(SINK, SINK + max(0, t - run.hot_start))
            parts = (keys[:, sink], values[:, sink, :value_dim], keys[:, hot])
            view = self._view(t, *parts, values[:, hot, :value_dim], warm)
            done = attend_hybrid(q[row], view, self._config)
            out[row] = done.out
            if done.selected is not None:
                self._selections[row, layer] = done.selected

    def _gather(self, pool: Tensor, run: _Run) -> Tensor:
        """[S, G, 32, D] -> [G, 32 n, D], blocks of ``run``."""
        blocks = pool.view(-1, BLOCK * pool.shape[3]).index_select(0, run.blocks)
        return blocks.view(pool.shape[1], -1, pool.shape[3])

    def _view(
        self,
        t: int,
        sink_k: Tensor,
        sink_v: Tensor,
        hot_k: Tensor,
        hot_v: Tensor,
        warm: WarmBlocks | None,
    ) -> LayerView:
        view = LayerView(t, sink_k, sink_v, hot_k, hot_v, warm)
        if not self._through_torch[is_dense(t, self._config.dense_below)]:
            return view
        # torch's products may round by where rows lie: always side by side, from the start
        dense_parts = (x.contiguous() for x in (sink_k, sink_v, hot_k, hot_v))
        return LayerView(t, *dense_parts, warm)


def _distinct(selected: np.ndarray) -> np.ndarray:
    """Number of different positions >= 0 in each of int32 [N, ...]: int64 [N]."""
    flat = np.sort(selected.reshape(len(selected), -1), axis=1)
    new = np.ones(flat.shape, np.bool_)
    new[:, 1:] = flat[:, 1:] != flat[:, :-1]
    return (new & (flat >= 0)).sum(axis=1)
