"""One layer of the tiered cache as kernels read it: pools, and a table of blocks a context.

Shapes: N contexts, J blocks of the longest, G key-value heads, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.view import LayerView, WarmBlocks
from engine.errors import AttentionError
from engine.kvcache.quantise import (
    BLOCK,
    WarmKeys,
    WarmValues,
    dequantise_keys,
    dequantise_values,
)

LATENT_ROWS = 16
"""Query heads a program serves in latent layers, where all of them share one key."""
FULL, WARM, ABSENT = 0, 1, 2
"""Tiers: read in full precision, read from codes, not on the device and so not seen."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Constants of ``tiled.attend_tile`` and of the kernels around it; ``tiles`` of query heads."""

    constants: dict[str, int]
    tiles: int


@dataclass(frozen=True, slots=True)
class TieredLayer:
    """full_k [S, G, 32, D] and full_v [S, G, 32, V]: blocks in full precision, fp32 or 16-bit;
    keys, values: pools of warm blocks. full_v and values None: latent attention, a value is the
    first channels of its key. table int32 [N, J]: a block's slot in its tier's pool; tiers int8
    [N, J]."""

    full_k: Tensor
    full_v: Tensor | None
    keys: WarmKeys
    values: WarmValues | None
    table: Tensor
    tiers: Tensor

    @property
    def groups(self) -> int:
        return self.full_k.shape[1]

    @property
    def key_dim(self) -> int:
        return self.full_k.shape[3]

    @property
    def value_bits(self) -> int:
        return 4 if self.values is not None and self.values.minimum is not None else 8

    @property
    def is_latent(self) -> bool:
        return self.full_v is None

    def value_dim(self, rank: int | None) -> int:
        """V; ``rank`` says it of latent layers, and only of them."""
        if self.full_v is not None:
            assert rank is None or rank == self.full_v.shape[3], f"{rank} is not the value size"
            return self.full_v.shape[3]
        assert rank is not None, "a latent layer does not know how much of a key is its value"
        return rank

    def key_tensors(self) -> tuple[Tensor, ...]:
        """What kernels read keys from: full, top, mid, low, minimum, scale, without gaps."""
        keys = self.keys
        halves = keys.minimum.contiguous(), keys.scale.contiguous()
        return self.full_k, keys.top, keys.mid, keys.low, *halves

    def value_tensors(self) -> tuple[Tensor, ...]:
        """Full, codes, scale, minimum; what a kernel does not read is stood for by another."""
        if self.full_v is None or self.values is None:
            return (self.full_k,) * 4
        scale, least = self.values.scale.contiguous(), self.values.minimum
        minimum = scale if least is None else least.contiguous()
        return self.full_v, self.values.codes, scale, minimum

    def sides(self, rows: int, value_dim: int) -> Sides:
        """Of attention with ``rows`` query heads a program or more."""
        from engine.kernels.launch import padded

        size, latent = self.key_dim, self.is_latent
        tile = LATENT_ROWS if latent else padded(rows)
        constants = {
            "D": size,
            "V": value_dim,
            "BITS": self.value_bits,
            "BLOCK_R": tile,
            "BLOCK_D": padded(value_dim if latent else size),
            "BLOCK_V": padded(value_dim),
            "BLOCK_P": padded(size - value_dim) if latent else 16,
            "LATENT": latent,
        }
        return Sides(constants, -(-rows // tile))

    def key_blocks(self, context: int, blocks: Tensor) -> Tensor:
        """blocks int64 [M] -> fp32 [M, G, 32, D]; absent blocks are zeros."""
        slots, tiers = self._find(context, blocks)
        out = self.full_k.new_zeros(len(blocks), *self.full_k.shape[1:], dtype=torch.float32)
        full, warm = tiers == FULL, tiers == WARM
        out[full] = self.full_k[slots[full]].float()
        out[warm] = dequantise_keys(pick_keys(self.keys, slots[warm]))
        return out

    def value_blocks(self, context: int, blocks: Tensor, value_dim: int) -> Tensor:
        """fp32 [M, G, 32, V]"""
        if self.values is None or self.full_v is None:
            return self.key_blocks(context, blocks)[..., :value_dim]
        slots, tiers = self._find(context, blocks)
        out = self.full_v.new_zeros(len(blocks), *self.full_v.shape[1:], dtype=torch.float32)
        full, warm = tiers == FULL, tiers == WARM
        out[full] = self.full_v[slots[full]].float()
        out[warm] = dequantise_values(pick_values(self.values, slots[warm]))
        return out

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """positions int64 [N, G, M], -1 for none -> keys fp32 [N, G, M, D], values [N, G, M, V] and
        bool [N, G, M]: whether the position is on the device. What is not is zeros."""
        tiers, slots, offset = self.locate(positions)
        full, warm = tiers == FULL, tiers == WARM
        coded = self._pool()
        tokens = torch.where(warm, slots * BLOCK + offset, 0)
        head = torch.arange(positions.shape[1], device=positions.device)[:, None]
        head = head.expand(positions.shape)
        place = (slots[full], head[full], offset[full])
        keys = self.full_k.new_zeros(*positions.shape, self.key_dim, dtype=torch.float32)
        keys[full] = self.full_k[place].float()
        if warm.any():
            keys[warm] = coded.key_rows(tokens)[warm]
        if self.full_v is None:
            return keys, keys, full | warm
        value_dim = self.full_v.shape[3]
        values = self.full_v.new_zeros(*positions.shape, value_dim, dtype=torch.float32)
        values[full] = self.full_v[place].float()
        if warm.any():
            values[warm] = coded.value_rows(tokens, value_dim)[warm]
        return keys, values, full | warm

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tier (ABSENT for -1), slot and offset of positions int64 [N, ...]."""
        known = positions.clamp(min=0)
        blocks = (known // BLOCK).flatten(1)
        tiers = self.tiers.gather(1, blocks).view(positions.shape)
        slots = self.table.gather(1, blocks).view(positions.shape).long()
        return torch.where(positions < 0, ABSENT, tiers), slots, known % BLOCK

    def _find(self, context: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[context, blocks].long(), self.tiers[context, blocks]

    def _pool(self) -> WarmBlocks:
        slots = torch.arange(len(self.keys.top), device=self.table.device)
        return WarmBlocks(self.keys, self.values, slots, slots)


def pick_keys(keys: WarmKeys, slots: Tensor) -> WarmKeys:
    return WarmKeys(
        keys.top[slots], keys.mid[slots], keys.low[slots], keys.minimum[slots], keys.scale[slots]
    )


def pick_values(values: WarmValues, slots: Tensor) -> WarmValues:
    minimum = values.minimum
    return WarmValues(
        values.codes[slots], values.scale[slots], None if minimum is None else minimum[slots]
    )


def layer_of_views(views: Sequence[LayerView], latent: bool = False) -> TieredLayer:
    """The same contexts as ``views``: copies sinks and hot tokens into blocks, shares the warm
    pools. For one layer of contexts that share pools; AttentionError when they do not."""
    pools = {id(view.warm.keys): view.warm for view in views if view.warm is not None}
    if len(pools) > 1:
        raise AttentionError(f"{len(pools)} warm pools in one layer; expected contexts of one pool")
    width = max(-(-view.length // BLOCK) for view in views)
    table = torch.zeros(len(views), width, dtype=torch.int32)
    tiers = torch.full((len(views), width), ABSENT, dtype=torch.int8)
    full_k: list[Tensor] = []
    full_v: list[Tensor] = []
    for n, view in enumerate(views):
        parts = [(0, view.sink_k, view.sink_v), (view.hot_start, view.hot_k, view.hot_v)]
        for start, k, v in parts:
            if not k.shape[1]:
                continue
            if start % BLOCK:
                raise AttentionError(f"hot tokens start at {start}, not at a block of {BLOCK}")
            count, first = -(-k.shape[1] // BLOCK), start // BLOCK
            table[n, first : first + count] = len(full_k) + torch.arange(count, dtype=torch.int32)
            tiers[n, first : first + count] = FULL
            full_k.extend(_as_blocks(k, count))
            full_v.extend(_as_blocks(v, count))
        if view.warm is not None:
            table[n, view.warm.blocks] = view.warm.slots.int()
            tiers[n, view.warm.blocks] = WARM
    k = torch.stack(full_k)
    warm = next(iter(pools.values())) if pools else None
    keys = warm.keys if warm is not None else no_keys(k)
    v = None if latent else torch.stack(full_v)
    values = warm.values if warm is not None else None if v is None else no_values(v)
    return TieredLayer(k, v, keys, values, table, tiers)


def no_keys(like: Tensor) -> WarmKeys:
    """A pool of no blocks for full keys ``like`` [S, G, 32, D]."""
    groups, size, device = like.shape[1], like.shape[3], like.device
    top, mid, low = (
        torch.zeros(0, groups, n, BLOCK, dtype=torch.uint8, device=device)
        for n in (size // 4, size // 4, size // 2)
    )
    half = torch.zeros(0, groups, size, dtype=torch.float16, device=device)
    return WarmKeys(top, mid, low, half, half)


def no_values(like: Tensor) -> WarmValues:
    shape, device = (0, like.shape[1], BLOCK), like.device
    return WarmValues(
        torch.zeros(*shape, like.shape[3], dtype=torch.int8, device=device),
        torch.zeros(*shape, dtype=torch.float16, device=device),
    )


def _as_blocks(x: Tensor, count: int) -> list[Tensor]:
    """[G, S, D] -> ``count`` times [G, 32, D], the last one padded with zeros."""
    padded = x.new_zeros(x.shape[0], count * BLOCK, x.shape[2])
    padded[:, : x.shape[1]] = x
    return list(padded.unflatten(1, (count, BLOCK)).unbind(1))
