"""KernelRows: one batch through TieredKV and the kernels of engine.kernels.step.

All rows of a layer go through each kernel at once, and the kernels read the cache's pools where
they lie. A row's bits do not depend on the others (decode_attn_tiered.kernel), only on the kernels:
they are not those of HybridRows.

Shapes: N rows, J blocks of the longest, A query heads, G key-value heads, P = A / G, K far tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.errors import NotSupportedError
from engine.kernels.step import check, decode_hybrid
from engine.kernels.tiered import ABSENT, FULL, WARM, TieredLayer
from engine.kvcache.quantise import BLOCK
from engine.kvcache.step import StepView
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import Tier
from engine.light.hybrid_rows import HybridRows, _Run, _Wave

SCORES = 1 << 24
"""Scores of a scan held at once: rows of long prompts come in parts."""


def check_kernels(kv: TieredKV, config: HybridConfig, hot_zone: object | None) -> None:
    """NotSupportedError for hybrid attention that no kernel computes."""
    check(config)
    if config.summary_weight > 0:
        raise NotSupportedError(
            f"engine.kernels = 'triton', but summary_weight = {config.summary_weight:g}: cold "
            "blocks' summaries have no kernel; set it to 0, or kernels to 'torch'"
        )
    if hot_zone is not None:
        raise NotSupportedError(
            "engine.kernels = 'triton', but engine.hot_zone wants attention weights, which kernels "
            "do not give back; leave it out, or set kernels = 'torch'"
        )
    if not kv.device.warm.keys:
        raise NotSupportedError(
            "engine.kernels = 'triton', but attention.profile = 'full' keeps no codes to scan; use "
            "another profile, or kernels = 'torch'"
        )


class KernelRows(HybridRows):
    """HybridRows with another way to read."""

    def __init__(
        self,
        kv: TieredKV,
        config: HybridConfig,
        selection_shape: tuple[int, ...],
        batch: Sequence[tuple[str, list[int]]],
        report_codes: bool = False,
    ) -> None:
        self._found: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        super().__init__(kv, config, selection_shape, (True, True), batch, report_codes)
        width = max(len(tier) for _, _, tier, _ in self._found)
        num_rows = len(self.order)
        table = np.zeros((num_rows, width), np.int32)
        tiers = np.full((num_rows, width), ABSENT, np.int8)
        lengths = np.zeros(num_rows, np.int64)
        row = 0
        for first, count, tier, slot in self._found:
            here = slice(row, row + count)
            lengths[here] = np.arange(first, first + count)
            table[here, : len(slot)] = slot
            tiers[here, : len(tier)] = np.select(
                [tier == Tier.FULL, tier == Tier.WARM], [FULL, WARM], ABSENT
            )
            row += count
        device = kv.device.full.keys[0].device
        self._table, self._tiers, self._lengths = (
            torch.from_numpy(x).to(device) for x in (table, tiers, lengths)
        )
        self._hot = max(view.config.hot for view in self._step.views)
        step = max(1, SCORES // (width * BLOCK * kv.layout.heads))
        self._parts = [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]

    def _run(self, owner: int, row: int, view: StepView, first: int, last: int) -> _Run:
        """Remembers what the run's rows read."""
        self._found.append((first, last - first + 1, *view.tiers(last)))
        return super()._run(owner, row, view, first, last)

    def _in_waves(self) -> list[_Wave]:
        """Nothing is gathered."""
        return []

    def _read(self, layer: int, scaled: Tensor, out: Tensor) -> None:
        pools, latent = self._kv.device, self._kv.layout.latent
        for part in self._parts:
            here = TieredLayer(
                pools.full.keys[layer],
                None if latent else pools.full.values[layer],
                pools.warm.keys[layer],
                None if latent else pools.warm.values[layer],
                self._table[part],
                self._tiers[part],
            )
            step = decode_hybrid(
                scaled[part],
                here,
                self._lengths[part],
                self._hot,
                self._config,
                1.0,
                implementation="triton",
                value_dim=out.shape[2] if latent else None,
            )
            out[part] = step.out
            chosen = self._selections[part, layer]
            chosen.copy_(step.selected.view(chosen.shape))
        if self._bad:
            bad = np.flatnonzero(np.isin(self._owners, list(self._bad)))
            out[torch.from_numpy(bad).to(out.device)] = torch.nan
