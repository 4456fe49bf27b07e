"""DeviceTiers: both pools and what links their slots. Every method needs the owner's lock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kvcache.config import BLOCK
from engine.kvcache.layout import CacheLayout, HeldBytes
from engine.kvcache.ops import CacheOps
from engine.kvcache.pools import Device, FullPool, WarmPool


class DeviceTiers:
    """A full slot that several contexts share may be coded by one of them while another still
    reads it. ``twin`` remembers the codes for the others, as long as both slots live."""

    def __init__(
        self,
        layout: CacheLayout,
        num_full: int,
        num_warm: int,
        dtype: torch.dtype,
        device: Device,
        debug_nan: bool,
    ) -> None:
        self.full = FullPool(layout, num_full, dtype, device, debug_nan)
        self.warm = WarmPool(layout, num_warm, device, debug_nan)
        self._twin: dict[int, int] = {}
        self._full_of: dict[int, int] = {}
        self.on_warm_gone: Callable[[int], None] = lambda slot: None

    def use(self, ops: CacheOps) -> None:
        """Write both pools with these from now on."""
        self.full.ops = self.warm.ops = ops

    @property
    def allocated_bytes(self) -> int:
        return self.full.nbytes + self.warm.nbytes

    @property
    def used_bytes(self) -> int:
        """Of slots that somebody holds, by the size of the real tensors."""
        full, warm = self.full.slots, self.warm.slots
        return (full.num_blocks - full.num_free) * self.full.slot_nbytes + (
            warm.num_blocks - warm.num_free
        ) * self.warm.slot_nbytes

    def held_bytes(self, cold: int) -> HeldBytes:
        """``used_bytes`` by tier, with ``cold`` bytes elsewhere."""
        full, warm = self.full.slots, self.warm.slots
        num_warm = warm.num_blocks - warm.num_free
        return HeldBytes(
            hot=(full.num_blocks - full.num_free) * self.full.slot_nbytes,
            warm=num_warm * self.warm.slot_nbytes,
            cold=cold,
            warm_bf16=self.warm.layout.bf16_bytes(num_warm * BLOCK),
        )

    def twin(self, full: int) -> int | None:
        """Warm slot with the codes of a full slot."""
        return self._twin.get(full)

    def pair(self, full: int, warm: int) -> None:
        self._twin[full] = warm
        self._full_of[warm] = full

    def unpair(self, full: int) -> None:
        """The full slot will be written again: its codes are no longer those of its content."""
        warm = self._twin.pop(full, None)
        if warm is not None:
            del self._full_of[warm]

    def drop_full(self, slots: list[int]) -> int:
        """Give one reference of each back; how many became free."""
        gone = self.full.drop(slots)
        for slot in gone:
            self.unpair(slot)
        return len(gone)

    def drop_warm(self, slots: list[int]) -> int:
        gone = self.warm.drop(slots)
        for slot in gone:
            full = self._full_of.pop(slot, None)
            if full is not None:
                del self._twin[full]
            self.on_warm_gone(slot)
        return len(gone)

    def code(self, full: list[int], warm: list[int]) -> None:
        """Code blocks outside a step."""
        sources, targets = torch.tensor(full), torch.tensor(warm)
        for layer in range(self.warm.layout.num_layers):
            self.code_layer(layer, sources, targets)

    def code_layer(self, layer: int, full: torch.Tensor, warm: torch.Tensor) -> list[int]:
        """Code blocks of a layer; indices of those that have no code."""
        device = self.full.keys[layer].device
        sources = full.to(device)
        k = self.full.keys[layer].index_select(0, sources)
        v = self.full.values[layer].index_select(0, sources) if self.full.values else None
        return self.warm.write(layer, warm.to(device), k, v)
