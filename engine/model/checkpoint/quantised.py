"""Released K2 checkpoints in fewer bits, made whole while they are read.

INT4 (K2-Thinking, K2.5): compressed-tensors "pack-quantized". For ``x.weight`` [M, N] the file has
x.weight_packed int32 [M, ceil(N / 8)], element 8 j + i in bits 4 i .. 4 i + 3 of word j, stored as
value + 8; x.weight_scale [M, N / group]; x.weight_shape int64 [2]. Only symmetric groups.

FP8 (K2-Instruct, DeepSeek-V3): x.weight float8_e4m3fn with x.weight_scale_inv fp32, one number for
each block of 128 x 128; weight = fp8 * scale, despite the name.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint.source import Entry, TensorSource

FP8_BLOCK = 128
_PACKED, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
_INVERSE = ".weight_scale_inv"


def unpack_int4(packed: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """packed int32 [M, ceil(N / 8)], scale [M, N / group] -> fp32 [M, N]."""
    rows, columns = shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed[:, :, None] >> shifts) & 0xF
    values = (nibbles.flatten(1)[:, :columns] - 8).float()
    group = columns // scale.shape[1]
    return (values.view(rows, -1, group) * scale.float()[:, :, None]).view(rows, columns)


def dequantise_fp8(weight: Tensor, scale: Tensor, block: int = FP8_BLOCK) -> Tensor:
    """weight float8_e4m3fn [M, N], scale fp32 [ceil(M / block), ceil(N / block)] -> fp32."""
    rows, columns = weight.shape
    spread = scale.float().repeat_interleave(block, 0)[:rows]
    return weight.float() * spread.repeat_interleave(block, 1)[:, :columns]


class Dequantised:
    """A source whose packed tensors appear under their plain names."""

    def __init__(self, source: TensorSource, block: int = FP8_BLOCK) -> None:
        self.where = source.where
        self._block = block
        self.entries: dict[str, Entry] = {}
        given = source.entries
        for name, entry in given.items():
            if name.endswith(_PACKED):
                stem = name.removesuffix(_PACKED)
                self.entries[f"{stem}.weight"] = self._int4(source, stem)
            elif name.endswith((_SCALE, _SHAPE, _INVERSE)) and self._has_weight(source, name):
                continue
            elif name.endswith((".weight_zero_point", ".weight_g_idx")):
                raise CheckpointError(
                    f"{source.where}: {name} belongs to asymmetric or reordered quantisation; "
                    "expected symmetric groups in order, as K2.5 was released"
                )
            elif f"{name}_scale_inv" in given:
                self.entries[name] = self._fp8(source, name)
            elif entry.stored.startswith("F8"):
                raise CheckpointError(
                    f"{source.where}: {name} is FP8 but {name}_scale_inv is missing; the "
                    "checkpoint is incomplete"
                )
            else:
                self.entries[name] = entry

    @staticmethod
    def _has_weight(source: TensorSource, name: str) -> bool:
        stem = name.rsplit(".", 1)[0]
        return f"{stem}{_PACKED}" in source.entries or f"{stem}.weight" in source.entries

    @staticmethod
    def _int4(source: TensorSource, stem: str) -> Entry:
        for part in (_SCALE, _SHAPE):
            if stem + part not in source.entries:
                raise CheckpointError(
                    f"{source.where}: {stem}{_PACKED} is there, {stem}{part} is missing; the "
                    "checkpoint is incomplete"
                )
        packed, scale = source.entries[stem + _PACKED], source.entries[stem + _SCALE]
        shape = source.entries[stem + _SHAPE]
        if shape.shape != (2,) or not shape.stored.startswith(("I", "U")):
            raise CheckpointError(
                f"{source.where}: {stem}{_SHAPE} is {list(shape.shape)} of {shape.stored}; "
                "expected two integers, rows and columns"
            )
        rows, columns = (int(size) for size in shape.read())
        words = (rows, -(-columns // 8))
        good_scale = (
            len(scale.shape) == 2
            and scale.shape[0] == rows
            and 0 < scale.shape[1] <= columns
            and columns % scale.shape[1] == 0
            and scale.stored in ("BF16", "F16", "F32")
            and packed.stored == "I32"
        )
        if packed.shape != words or not good_scale:
            raise CheckpointError(
                f"{source.where}: {stem}{_PACKED} {packed.shape} of {packed.stored} with scales "
                f"{scale.shape} of {scale.stored} does not hold {rows} x {columns} 4-bit values; "
                f"expected {words} words of I32 and one scale a row and group"
            )
        return Entry(
            (rows, columns),
            lambda: unpack_int4(packed.read(), scale.read(), (rows, columns)),
            "INT4",
        )

    def _fp8(self, source: TensorSource, name: str) -> Entry:
        weight, scale = source.entries[name], source.entries[f"{name}_scale_inv"]
        blocks = tuple(-(-size // self._block) for size in weight.shape)
        if len(blocks) != 2 or scale.shape != blocks or scale.stored not in ("F32", "BF16"):
            raise CheckpointError(
                f"{source.where}: {name}_scale_inv is {scale.shape} of {scale.stored}, expected "
                f"{blocks} of F32: one "
                f"number for each {self._block} x {self._block} block of {weight.shape}"
            )
        read = weight.read
        return replace(
            weight, read=lambda: dequantise_fp8(read(), scale.read(), self._block), stored="FP8"
        )
