"""HybridRows: one batch through TieredKV, a query row at a time.

Shapes: N rows, A query heads, G key-value heads, P = A / G, D key size, V value size, K far tokens
a head. A row reads what its position decides, in the order of positions, with the same calls
whatever else is in the batch: that is what keeps its bits. Compiled code reads neighbours together,
on torch's number of threads, and gives each the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.attention import native
from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.topology import SINK, is_dense
from engine.attention.view import LayerView, WarmBlocks
from engine.errors import NotSupportedError
from engine.kvcache.pools import FullPool
from engine.kvcache.quantise import BLOCK
from engine.kvcache.step import StepView
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import Tier, warm_end
from engine.light.block_summaries import BlockSummaries
from engine.light.hot_watch import HotWatch
from engine.light.learnt_indices import LearntIndices
from engine.light.rows import Reads

WAVE_BYTES = 32 << 20
"""Full-precision blocks copied at once, so that a pass over many contexts needs bounded memory."""
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

    def rows(self, keys: Tensor, values: Tensor) -> list[_Row]:
        """keys [G, 32 n, D], values [G, 32 n, V]: where ``blocks`` are gathered."""
        found: list[_Row] = []
        for length in range(self.first, self.first + self.count):
            sink, end = min(SINK, length), SINK + max(0, length - self.hot_start)
            ends = keys[:, :sink], values[:, :sink], keys[:, SINK:end], values[:, SINK:end]
            found.append((length, ends))
        return found


_Row = tuple[int, tuple[Tensor, Tensor, Tensor, Tensor]]
"""A query's context length; sink keys and values, hot keys and values, as LayerView wants them."""


@dataclass(frozen=True, slots=True)
class _Wave:
    """Runs whose full-precision blocks are gathered at once. ``memory``: keys [n, 32 D], values
    [n, 32 V] (none when latent); every layer fills it anew, so that rows keep their views of it."""

    blocks: Tensor
    memory: list[Tensor]
    runs: list[tuple[_Run, list[_Row]]]

    @classmethod
    def of(cls, runs: list[_Run], memory: list[Tensor], heads: int, value_dim: int) -> _Wave:
        blocks = torch.cat([run.blocks for run in runs])
        memory = [part[: len(blocks)] for part in memory]
        rows: list[tuple[_Run, list[_Row]]] = []
        start = 0
        for run in runs:
            end = start + len(run.blocks)
            parts = [
                part[start:end].view(heads, len(run.blocks) // heads * BLOCK, -1) for part in memory
            ]
            rows.append((run, run.rows(parts[0], parts[-1][..., :value_dim])))
            start = end
        return cls(blocks, memory, rows)

    def gather(self, layer: int, pool: FullPool) -> None:
        for tensor, part in zip(
            [pool.keys[layer]] + ([pool.values[layer]] if pool.values else []),
            self.memory,
            strict=True,
        ):
            torch.index_select(tensor.view(-1, part.shape[1]), 0, self.blocks, out=part)


class HybridRows:
    """CacheRows over TieredKV."""

    def __init__(
        self,
        kv: TieredKV,
        config: HybridConfig,
        selection_shape: tuple[int, ...],
        through_torch: Through,
        batch: Sequence[tuple[str, list[int]]],
        report_codes: bool = False,
        watch: HotWatch | None = None,
        summaries: BlockSummaries | None = None,
        indices: LearntIndices | None = None,
    ) -> None:
        """``batch``: contexts with rising positions, without a gap; selection_shape: layers, G,
        P | 1, K."""
        self._kv = kv
        self._report_codes = report_codes
        self._batch = batch
        # a context no longer than the sink has no far tokens: the same tokens are read
        dense_below = max(config.dense_below, SINK)
        self._config = config.model_copy(update={"dense_below": dense_below})
        self._bad: set[int] = set()
        """Contexts that wrote NaN or infinity: nothing is read of them any more."""
        self._through_torch = through_torch
        self._step = self._kv.begin_step(self._batch)
        self._runs = list(self._all_runs())
        self._watch = watch
        self._summaries = summaries
        self._indices = indices
        self._newest = {run.owner: run for run in self._runs}
        last = self._runs[-1]
        num_rows = last.row + last.count
        self.order = np.arange(num_rows)
        self._waves = self._in_waves()
        self._owners = np.repeat([r.owner for r in self._runs], [r.count for r in self._runs])
        self._selections = torch.full((num_rows, *selection_shape), -1, dtype=torch.int32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(self.order)
        self._kv.write(layer, self._step, k[:n], v[:n])
        if self._summaries is not None:
            self._summaries.learn(layer, self._kv, self._step)
        self._mark_bad(q[:n], k[:n], v[:n])
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        self._read(layer, q.float() * q.shape[-1] ** -0.5, out)
        return out

    def _read(self, layer: int, scaled: Tensor, out: Tensor) -> None:
        compiled = None
        if not all(self._through_torch):
            chosen = self._selections[:, layer]
            compiled = native.Rows(native.load(), self._config, scaled, out, chosen)
        for wave in self._waves:
            wave.gather(layer, self._kv.device.full)
            for run, rows in wave.runs:
                if run.owner in self._bad:
                    out[run.row : run.row + run.count] = torch.nan
                else:
                    self._attend_run(layer, run, rows, scaled, out, compiled)
            if compiled is not None:
                compiled.run(torch.get_num_threads())
            if self._watch is not None and layer == self._watch.layer:
                for run, rows in wave.runs:
                    self._look(run, rows[-1], scaled, self._warm_of(layer, run))

    def finish(self) -> Reads:
        codes = self._fresh_codes() if self._report_codes else {}
        self._kv.end_step(self._step)
        if self._watch is not None:
            self._watch.finish()
        warm = np.concatenate([np.full(r.count, BLOCK * len(r.warm_blocks)) for r in self._runs])
        failed = self._step.failed
        bad = self._bad | {i for i, (ctx, _) in enumerate(self._batch) if ctx in failed}
        selections = self._selections.numpy()
        return Reads(
            selections, warm, _distinct(selections[:, 0]), np.isin(self._owners, list(bad)), codes
        )

    def _fresh_codes(self) -> dict[int, dict[int, np.ndarray]]:
        """Before the step ends: then other steps may take the slots."""
        moves = self._step.coding.moves
        if not moves:
            return {}
        slots = sorted({slot for _, _, _, slot in moves})
        # copies: a view would hold all of them as long as one is wanted
        payloads = [part.copy() for part in self._kv.device.warm.read(slots)]
        by_slot = dict(zip(slots, payloads, strict=True))
        owners = {ctx: owner for owner, (ctx, _) in enumerate(self._batch)}
        found: dict[int, dict[int, np.ndarray]] = {}
        for view, block, _, slot in moves:
            found.setdefault(owners[view.context.id], {})[block] = by_slot[slot]
        return found

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

    def _in_waves(self) -> list[_Wave]:
        """Memory of one wave serves all of them, in all layers."""
        layout = self._kv.layout
        limit = max(1, WAVE_BYTES // (BLOCK * (layout.key_dim + layout.value_dim) * 4))
        groups: list[list[_Run]] = []
        size = limit
        for run in self._runs:
            if size + len(run.blocks) > limit:
                groups.append([])
                size = 0
            groups[-1].append(run)
            size += len(run.blocks)
        most = max(sum(len(run.blocks) for run in runs) for runs in groups)
        full = self._kv.device.full
        pools = [full.keys[0]] + ([full.values[0]] if full.values else [])
        memory = [pool.new_empty(most, BLOCK * pool.shape[3]) for pool in pools]
        return [_Wave.of(runs, memory, layout.heads, layout.value_dim) for runs in groups]

    # -- a layer --------------------------------------------------------------------------------

    def _mark_bad(self, *rows: Tensor) -> None:
        finite = torch.stack([x.flatten(1).isfinite().all(dim=1) for x in rows]).all(dim=0)
        if not finite.all():
            self._bad.update(self._owners[~finite.numpy()].tolist())

    def _warm_of(self, layer: int, run: _Run) -> WarmBlocks | None:
        if not len(run.warm_blocks):
            return None
        pool = self._kv.device.warm
        coded = pool.values[layer] if pool.values else None
        return WarmBlocks(pool.keys[layer], coded, run.warm_blocks, run.warm_slots)

    def _attend_run(
        self,
        layer: int,
        run: _Run,
        rows: list[_Row],
        scaled: Tensor,
        out: Tensor,
        compiled: native.Rows | None,
    ) -> None:
        """Through torch at once, or into ``compiled`` for later."""
        warm = self._warm_of(layer, run)
        config, selections = self._config, self._selections
        name = self._batch[run.owner][0]
        index = None if self._indices is None else self._indices.index(name, layer)
        made = None
        # a weight of 0 beside summaries: they are skipped for now, and learned for later
        if self._summaries is not None and config.summary_weight > 0:
            made = self._summaries.summaries(name, layer, run.hot_start // BLOCK)
            # nothing is coded yet: without any, the call must not ask for some
            config = config if made else config.model_copy(update={"summary_weight": 0.0})
        by_kind = groupby(
            enumerate(rows, run.row), key=lambda item: is_dense(item[1][0], config.dense_below)
        )
        for dense, found in by_kind:
            group = list(found)
            if compiled is not None and not self._through_torch[dense]:
                length, parts = group[-1][1]
                compiled.add(LayerView(length, *parts, warm), group[0][0], len(group))
                continue
            for row, (length, parts) in group:
                # torch may round by where rows lie: side by side, from the start of their memory
                sink_k, sink_v, hot_k, hot_v = (part.contiguous() for part in parts)
                view = LayerView(length, sink_k, sink_v, hot_k, hot_v, warm)
                done = attend_hybrid(scaled[row], view, config, index, 1.0, made)
                out[row] = done.out
                if done.selected is not None:
                    selections[row, layer] = done.selected

    def _look(self, run: _Run, newest: _Row, scaled: Tensor, warm: WarmBlocks | None) -> None:
        """At the newest row of a context, unless it reads everything."""
        length, parts = newest
        if run.owner in self._bad:
            return
        if self._newest[run.owner] is run and not is_dense(length, self._config.dense_below):
            assert self._watch is not None, "asked by it"
            row = run.row + run.count - 1
            chosen = self._selections[row, self._watch.layer]
            name = self._batch[run.owner][0]
            self._watch.see(name, length, scaled[row], parts, warm, chosen)


def _distinct(selected: np.ndarray) -> np.ndarray:
    """Number of different positions >= 0 in each of int32 [N, ...]: int64 [N]."""
    flat = np.sort(selected.reshape(len(selected), -1), axis=1)
    new = np.ones(flat.shape, np.bool_)
    new[:, 1:] = flat[:, 1:] != flat[:, :-1]
    return (new & (flat >= 0)).sum(axis=1)
