"""An oracle for TieredKV: plain dicts of rows, tiers from tier_of, and a driver for both."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.quantise import (
    BLOCK,
    WarmKeys,
    WarmValues,
    dequantise_keys,
    dequantise_values,
    quantise_keys,
    quantise_values,
)
from engine.kvcache.step import LayerRead
from engine.kvcache.tiered import TieredKV
from engine.kvcache.tiers import Tier, tier_of

LAYERS, HEADS, DIM = 2, 2, 8


def make_cache(config: TierConfig, num_full: int = 64, num_warm: int = 128) -> TieredKV:
    layout = CacheLayout(LAYERS, HEADS, DIM, DIM, config.profile, full_bytes=4)
    return TieredKV(layout, config, num_full=num_full, num_warm=num_warm, model_id="tiny")


@functools.lru_cache(maxsize=1 << 16)
def row(seed: int, position: int, layer: int) -> tuple[Tensor, Tensor]:
    """Key and value [G, D] of a token: a function of these three."""
    numbers = np.random.default_rng((seed, position, layer)).standard_normal(2 * HEADS * DIM)
    k, v = torch.from_numpy(numbers.astype(np.float32)).view(2, HEADS, DIM)
    return k, v


def rows(seeds: list[int], positions: list[int], layer: int) -> tuple[Tensor, Tensor]:
    pairs = [row(s, p, layer) for s, p in zip(seeds, positions, strict=True)]
    if not pairs:
        return torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM)
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


@dataclass
class Model:
    """What one context should hold. ``seeds``: by position, None where it is missing; ``cold`` and
    ``kept``: blocks that were sent away or fetched back on request."""

    config: TierConfig
    seeds: list[int | None] = field(default_factory=list)
    cold: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    def copy(self) -> Model:
        return Model(self.config, list(self.seeds), set(self.cold), set(self.kept))

    def tier(self, block: int) -> Tier:
        tier = tier_of(block, len(self.seeds), self.config)
        seeds = self.seeds[block * BLOCK : (block + 1) * BLOCK]
        if all(seed is None for seed in seeds):
            return Tier.ABSENT
        if None in seeds:
            return Tier.FULL
        if block in self.kept and tier == Tier.COLD:
            return Tier.WARM
        if block in self.cold:
            return Tier.COLD
        if block in self.kept and tier == Tier.FULL:
            # fetched back while young: there is no way up from codes
            return Tier.WARM
        return tier

    def expect(self, block: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """[G, n, D] of the block's tokens as a query reads them now; None when it reads none."""
        tier = self.tier(block)
        if tier in (Tier.ABSENT, Tier.COLD):
            return None
        seeds = self.seeds[block * BLOCK : (block + 1) * BLOCK]
        known = [(s, block * BLOCK + i) for i, s in enumerate(seeds) if s is not None]
        k, v = rows([s for s, _ in known], [p for _, p in known], layer)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if tier == Tier.WARM:
            profile = self.config.profile
            k = dequantise_keys(quantise_keys(k[None], profile))[0]
            v = dequantise_values(quantise_values(v[None], profile))[0]
        return k, v


def read_block(read: LayerRead, block: int) -> tuple[Tensor, Tensor] | None:
    """The block as the cache gives it, dequantised: [G, 32, D] twice."""
    full = read.full_blocks.tolist()
    if block in full:
        slot = int(read.full_slots[full.index(block)])
        assert read.full_values is not None
        return read.full_keys[slot], read.full_values[slot]
    warm = read.warm_blocks.tolist()
    if block not in warm:
        return None
    slot = int(read.warm_slots[warm.index(block)])
    assert read.warm_keys is not None and read.warm_values is not None
    one = slice(slot, slot + 1)
    keys, values = read.warm_keys, read.warm_values
    k = WarmKeys(keys.top[one], keys.mid[one], keys.low[one], keys.minimum[one], keys.scale[one])
    minimum = None if values.minimum is None else values.minimum[one]
    v = WarmValues(values.codes[one], values.scale[one], minimum)
    return dequantise_keys(k)[0], dequantise_values(v)[0]


def step(kv: TieredKV, models: dict[str, Model], batch: dict[str, tuple[int, list[int]]]) -> None:
    """Write rows (seed, positions) of each context in one step, on both sides."""
    with kv.step([(ctx, positions) for ctx, (_, positions) in batch.items()]) as running:
        seeds = [s for seed, positions in batch.values() for s in [seed] * len(positions)]
        positions = [p for _, positions in batch.values() for p in positions]
        for layer in range(LAYERS):
            kv.write(layer, running, *rows(seeds, positions, layer))
    for ctx, (seed, positions) in batch.items():
        model = models[ctx]
        known = len(model.seeds)
        model.seeds += [None] * (max([known - 1, *positions]) + 1 - known)
        for position in positions:
            model.seeds[position] = seed


def check(kv: TieredKV, ctx: str, model: Model) -> None:
    """Every block, both layers, to the bit; counts and missing positions too."""
    with kv.step([(ctx, [])]) as reading:
        view = reading.views[0]
        assert view.length == len(model.seeds)
        for layer in range(LAYERS):
            read = kv.read(layer, view)
            for block in range(-(-len(model.seeds) // BLOCK)):
                expected, found = model.expect(block, layer), read_block(read, block)
                if expected is None:
                    assert found is None, f"block {block} should not be readable"
                    continue
                assert found is not None, f"block {block} should be {model.tier(block).name}"
                first = model.seeds[block * BLOCK : (block + 1) * BLOCK]
                there = torch.tensor([seed is not None for seed in first])
                for one, other in zip(expected, found, strict=True):
                    assert torch.equal(one, other[:, : len(first)][:, there])
    missing = [p for p, seed in enumerate(model.seeds) if seed is None]
    assert kv.missing(ctx).tolist() == missing
    tokens = dict.fromkeys(Tier, 0)
    for position, seed in enumerate(model.seeds):
        tokens[model.tier(position // BLOCK)] += seed is not None
    summary = kv.summary(ctx)
    assert summary.num_tokens == len(model.seeds)
    counts = (summary.num_hot, summary.num_warm, summary.num_cold)
    assert counts == (tokens[Tier.FULL], tokens[Tier.WARM], tokens[Tier.COLD])
