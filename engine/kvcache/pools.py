"""Tensors of the two device tiers, by slot. No contexts here.

Shapes: S slots, G key-value heads, D key size, V value size, n chosen slots. Slot 0 of a pool
belongs to nobody and holds zeros: it stands for "not here" in block tables.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.errors import QuantiseError
from engine.kvcache.blocks import BlockPool
from engine.kvcache.layout import CacheLayout
from engine.kvcache.ops import CacheOps, TorchCacheOps
from engine.kvcache.quantise import (
    BLOCK,
    VALUE_GROUP,
    WarmKeys,
    WarmValues,
)

Device = torch.device | str


class FullPool:
    """keys [layers][S, G, 32, D] and values [layers][S, G, 32, V] (none when latent)."""

    def __init__(
        self, layout: CacheLayout, num_slots: int, dtype: torch.dtype, device: Device, nan: bool
    ) -> None:
        assert dtype.itemsize == layout.full_bytes, f"{dtype} is not {layout.full_bytes} bytes"
        self.slots = BlockPool(num_slots)
        self.ops: CacheOps = TorchCacheOps()
        self._nan = nan
        shape = (num_slots + 1, layout.heads, BLOCK)
        self.keys = _filled(layout.num_layers, (*shape, layout.key_dim), dtype, device, nan)
        num_values = 0 if layout.latent else layout.num_layers
        self.values = _filled(num_values, (*shape, layout.value_dim), dtype, device, nan)

    @property
    def nbytes(self) -> int:
        """Really allocated."""
        return sum(t.untyped_storage().nbytes() for t in self.keys + self.values)

    @property
    def slot_nbytes(self) -> int:
        return sum(t[0].numel() * t.element_size() for t in self.keys + self.values)

    def take(self, count: int) -> list[int]:
        """Slots of zeros: what is not written yet is masked, but 0 * NaN is still NaN."""
        slots = self.slots.allocate(count)
        self._fill(slots, 0.0)
        return slots

    def drop(self, slots: list[int]) -> list[int]:
        """Give one reference of each back; those that nobody holds any more."""
        gone = _drop(self.slots, slots)
        if self._nan:
            self._fill(gone, torch.nan)
        return gone

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Put k [N, G, D], v [N, G, V] at flat rows int64 [N * G], see ``rows``."""
        values = self.values[layer] if self.values else None
        self.ops.append(self.keys[layer], values, rows, k, v)

    def rows(self, slots: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Flat rows of tokens at (slot, offset), int64 [N] each -> int64 [N * G]."""
        heads = self.keys[0].shape[1]
        flat = (slots[:, None] * heads + np.arange(heads)) * BLOCK + offsets[:, None]
        return torch.from_numpy(flat.reshape(-1)).to(self.keys[0].device)

    def copy(self, source: int, target: int) -> None:
        for tensor in self.keys + self.values:
            tensor[target] = tensor[source]

    def _fill(self, slots: list[int], number: float) -> None:
        for tensor in self.keys + self.values if slots else []:
            tensor[slots] = number


class WarmPool:
    """Codes of blocks, whole pools: ``keys[layer]``, ``values[layer]`` (none when latent)."""

    def __init__(self, layout: CacheLayout, num_slots: int, device: Device, nan: bool) -> None:
        self.layout = layout
        self.slots = BlockPool(num_slots)
        self.ops: CacheOps = TorchCacheOps()
        self._nan = nan
        self._tensors: list[list[Tensor]] = []
        self.keys: list[WarmKeys] = []
        self.values: list[WarmValues] = []
        for _ in range(layout.num_layers if layout.profile != "full" else 0):
            self._add_layer(num_slots + 1, device)
        self._poison(list(range(1, num_slots + 1)))

    def _add_layer(self, size: int, device: Device) -> None:
        layout = self.layout
        shape, d, v = (size, layout.heads), layout.key_dim, layout.value_dim

        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, *sizes, dtype=dtype, device=device)

        u8, i8, f16 = torch.uint8, torch.int8, torch.float16
        top, mid, low = (zeros(size, BLOCK, dtype=u8) for size in (d // 4, d // 4, d // 2))
        num_scales = 1 if layout.profile == "literal" else d
        minimum, scale = zeros(num_scales, dtype=f16), zeros(num_scales, dtype=f16)
        wide = (minimum.expand(*shape, d), scale.expand(*shape, d))
        self.keys.append(WarmKeys(top, mid, low, *wide))
        tensors = [top, mid, low, minimum, scale]
        if not layout.latent and layout.profile == "k8v4":
            groups = -(-v // VALUE_GROUP)
            codes = zeros(BLOCK, v // 2, dtype=u8)
            scale, minimum = (zeros(BLOCK, groups, dtype=f16) for _ in range(2))
            self.values.append(WarmValues(codes, scale, minimum))
            tensors += [codes, scale, minimum]
        elif not layout.latent:
            codes = zeros(BLOCK, v, dtype=i8)
            scale = zeros(1 if layout.profile == "literal" else BLOCK, dtype=f16)
            self.values.append(WarmValues(codes, scale.expand(*shape, BLOCK)))
            tensors += [codes, scale]
        self._tensors.append(tensors)

    @property
    def nbytes(self) -> int:
        """Really allocated."""
        return sum(t.untyped_storage().nbytes() for layer in self._tensors for t in layer)

    @property
    def slot_nbytes(self) -> int:
        return sum(t[0].numel() * t.element_size() for layer in self._tensors for t in layer)

    def take(self, count: int) -> list[int]:
        return self.slots.allocate(count)

    def drop(self, slots: list[int]) -> list[int]:
        """Give one reference of each back; those that nobody holds any more."""
        gone = _drop(self.slots, slots)
        self._poison(gone)
        return gone

    def touch(self, slots: list[int]) -> None:
        """Write zeros, so that the memory is there."""
        for tensor in (t for layer in self._tensors for t in layer):
            tensor[slots] = 0

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> list[int]:
        """Code k [n, G, 32, D], v [n, G, 32, V] into slots int64 [n]; indices of blocks that have
        no code (NaN, or too large). Their scale becomes NaN: who reads one must see it."""
        try:
            self._store(layer, slots, self._code(k, v))
        except QuantiseError:
            if len(slots) > 1:
                return [i for i in range(len(slots)) if self._write_one(layer, slots, k, v, i)]
            self._tensors[layer][4][slots] = torch.nan
            return [0]
        return []

    def _write_one(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, i: int) -> bool:
        one = slice(i, i + 1)
        return bool(self.write(layer, slots[one], k[one], None if v is None else v[one]))

    def _code(self, k: Tensor, v: Tensor | None) -> list[Tensor]:
        profile = self.layout.profile
        keys, values = self.ops.quantise(k, None if self.layout.latent else v, profile)
        coded = [keys.top, keys.mid, keys.low, keys.minimum, keys.scale]
        if values is not None:
            coded += [values.codes, values.scale]
            coded += [] if values.minimum is None else [values.minimum]
        return coded

    def _store(self, layer: int, slots: Tensor, coded: list[Tensor]) -> None:
        for pool, tensor in zip(self._tensors[layer], coded, strict=True):
            # literal: one scale stands for all channels
            if tensor.shape[2:] != pool.shape[2:]:
                tensor = tensor[:, :, : pool.shape[2]]
            pool.index_copy_(0, slots, tensor.contiguous())

    def read(self, slots: list[int]) -> np.ndarray:
        """Payloads of cold records: uint8 [n, warm_block_bytes], layer after layer."""
        chosen = torch.tensor(slots)
        parts = [
            tensor.index_select(0, chosen.to(tensor.device)).reshape(len(slots), -1)
            for layer in self._tensors
            for tensor in layer
        ]
        return np.concatenate([part.cpu().view(torch.uint8).numpy() for part in parts], axis=1)

    def restore(self, slot: int, payload: np.ndarray) -> None:
        """Put back what ``read`` gave, to the bit."""
        start = 0
        for tensor in (tensor for layer in self._tensors for tensor in layer):
            target = tensor[slot]
            end = start + target.numel() * target.element_size()
            piece = torch.from_numpy(payload[start:end].copy()).view(target.dtype)
            target.copy_(piece.view(target.shape))
            start = end
        assert start == len(payload), f"payload of {len(payload)} bytes, expected {start}"

    def _poison(self, slots: list[int]) -> None:
        for tensor in (t for layer in self._tensors for t in layer) if self._nan and slots else ():
            if tensor.is_floating_point():
                tensor[slots] = torch.nan


def _filled(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: Device, nan: bool
) -> list[Tensor]:
    tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
    for tensor in tensors if nan else []:
        tensor[1:] = torch.nan
    return tensors


def _drop(pool: BlockPool, slots: list[int]) -> list[int]:
    gone = []
    for slot in slots:
        if pool.free([slot]):
            gone.append(slot)
    return gone
