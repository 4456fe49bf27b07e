"""What attention reads of one context and layer: full-precision ends and coded blocks between.

Shapes: G key-value heads, D key size, V value size, W warm blocks, S sink tokens (at most 32),
H hot tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import AttentionError
from engine.kvcache.quantise import (
    BLOCK,
    WarmKeys,
    WarmValues,
    dequantise_keys,
    dequantise_values,
)


@dataclass(frozen=True, slots=True)
class WarmBlocks:
    """Warm blocks of a context that lie in pools, which other contexts may share.

    keys, values: pools [slots, G, ...]; values None: latent attention, the value is the key's
    first V channels. blocks int64 [W]: block numbers, rising; what is missing is cold and not
    seen. slots int64 [W]: where each lies in the pools.
    """

    keys: WarmKeys
    values: WarmValues | None
    blocks: Tensor
    slots: Tensor

    def __len__(self) -> int:
        return len(self.blocks)

    def positions(self) -> Tensor:
        """int64 [32 W]"""
        return (self.blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()

    def gathered_keys(self, begin: int = 0, end: int | None = None) -> WarmKeys:
        """Blocks begin .. end - 1 of this view, side by side."""
        slots = self.slots[begin:end]
        keys = self.keys
        return WarmKeys(
            keys.top[slots],
            keys.mid[slots],
            keys.low[slots],
            keys.minimum[slots],
            keys.scale[slots],
        )

    def dequantised_keys(self) -> Tensor:
        """fp32 [G, 32 W, D]"""
        return dequantise_keys(self.gathered_keys()).transpose(0, 1).flatten(1, 2)

    def dequantised_values(self, value_dim: int) -> Tensor:
        """fp32 [G, 32 W, V]"""
        if self.values is None:
            return self.dequantised_keys()[..., :value_dim]
        values = self.values
        picked = WarmValues(
            values.codes[self.slots],
            values.scale[self.slots],
            None if values.minimum is None else values.minimum[self.slots],
        )
        return dequantise_values(picked).transpose(0, 1).flatten(1, 2)

    def key_rows(self, tokens: Tensor) -> Tensor:
        """tokens int64 [R, G, M], 32 * (place in this view) + offset -> fp32 [R, G, M, D]."""
        slot, head, offset = self._address(tokens)
        keys = self.keys
        top, mid = keys.top[slot, head, :, offset], keys.mid[slot, head, :, offset]
        quads = [((top >> s) & 3) << 2 | ((mid >> s) & 3) for s in (0, 2, 4, 6)]
        low = keys.low[slot, head, :, offset]
        nibbles = torch.stack([low & 15, low >> 4], dim=-1).flatten(-2)
        codes = torch.stack(quads, dim=-1).flatten(-2) << 4 | nibbles
        minimum, scale = _picked(keys.minimum, slot, head), _picked(keys.scale, slot, head)
        return minimum.float() + scale.float() * codes.float()

    def value_rows(self, tokens: Tensor, value_dim: int) -> Tensor:
        """tokens as in key_rows -> fp32 [R, G, M, V]."""
        if self.values is None:
            return self.key_rows(tokens)[..., :value_dim]
        slot, head, offset = self._address(tokens)
        values = self.values
        minimum = values.minimum
        rows = WarmValues(
            _picked(values.codes, slot, head, offset),
            values.scale[slot, head, offset],
            None if minimum is None else minimum[slot, head, offset],
        )
        return dequantise_values(rows)

    def _address(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slot = self.slots[tokens // BLOCK]
        head = torch.arange(tokens.shape[1])[:, None].expand(tokens.shape)
        return slot, head, tokens % BLOCK


def _picked(pool: Tensor, *places: Tensor) -> Tensor:
    """pool[places], as copies of whole rows where the pool is dense: indexing goes by elements."""
    if not pool.is_contiguous():
        return pool[places]
    place, rows = places[0], pool
    for along in places[1:]:
        place, rows = place * rows.shape[1] + along, rows.flatten(0, 1)
    return rows.index_select(0, place.flatten()).unflatten(0, place.shape)


def dense_keys(keys: WarmKeys) -> WarmKeys:
    """As pools lie: every number stored, in order. Fresh codes are strided and may be expanded."""
    return WarmKeys(
        keys.top.contiguous(),
        keys.mid.contiguous(),
        keys.low.contiguous(),
        keys.minimum.contiguous(),
        keys.scale.contiguous(),
    )


def dense_values(values: WarmValues) -> WarmValues:
    minimum = values.minimum
    return WarmValues(
        values.codes.contiguous(),
        values.scale.contiguous(),
        None if minimum is None else minimum.contiguous(),
    )


@dataclass(frozen=True, slots=True)
class LayerView:
    """One context's keys and values in one layer at a decode step of context length ``length``.

    sink_k [G, S, D], sink_v [G, S, V]: positions 0 .. S - 1. hot_k [G, H, D], hot_v [G, H, V]:
    the last H positions. fp32 or bf16, any strides with the last dimension dense. ``warm`` covers
    what lies between and is on the device, None when there is nothing.
    """

    length: int
    sink_k: Tensor
    sink_v: Tensor
    hot_k: Tensor
    hot_v: Tensor
    warm: WarmBlocks | None = None

    def __post_init__(self) -> None:
        sink, hot = self.sink_k.shape[1], self.hot_k.shape[1]
        if sink != min(self.length, BLOCK) or sink + hot > self.length:
            raise AttentionError(
                f"a context of {self.length} tokens with a sink of {sink} and {hot} hot tokens is "
                f"not one: the sink is its first {BLOCK}, the hot tokens come after it"
            )
        if self.warm is not None and len(self.warm):
            last = int(self.warm.blocks[-1])
            if int(self.warm.blocks[0]) < 1 or BLOCK * (last + 1) > self.hot_start:
                raise AttentionError(
                    f"warm blocks {int(self.warm.blocks[0])} .. {last} overlap the sink or the hot "
                    f"tokens from {self.hot_start} on; a position may be in one tier only"
                )

    @property
    def hot_start(self) -> int:
        return self.length - self.hot_k.shape[1]
