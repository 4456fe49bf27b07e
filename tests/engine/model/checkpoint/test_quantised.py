"""INT4 and FP8 checkpoints: the formats bit by bit, and folders that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint.load import load_model, open_checkpoint
from engine.model.checkpoint.quantised import dequantise_fp8, unpack_int4
from engine.model.checkpoint.save import save_model
from tests.engine.tiny import MLA, make_model


def pack_int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    """What compressed-tensors writes for symmetric groups, element by element."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group)
    scale = (grouped.abs().amax(-1) / 7).bfloat16()
    values = (grouped / scale.float()[..., None]).round().clamp(-8, 7).view(rows, columns)
    words = torch.zeros(rows, -(-columns // 8), dtype=torch.int64)
    for column in range(columns):
        words[:, column // 8] |= (values[:, column].long() + 8) << (4 * (column % 8))
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([rows, columns], dtype=torch.int64)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}


def pack_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Blocks scaled to 448, the largest number of float8_e4m3fn; ragged at the edges."""
    rows, columns = (-(-size // block) for size in weight.shape)
    scale = torch.ones(rows, columns)
    packed = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight[part].abs().max() / 448
            packed[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return packed, scale


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_int4_words():
    """Low nibble first, value + 8, one scale a group: worked out by hand."""
    packed = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)
    scale = torch.tensor([[1.0, 0.5]])
    expected = [[-8, -7, -6, -5, -4, -3, -2, -1, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]]
    assert unpack_int4(packed, scale, (1, 16)).tolist() == expected


@pytest.mark.parametrize(("rows", "columns", "group"), [(3, 64, 32), (5, 24, 12), (2, 20, 4)])
def test_int4_there_and_back(rows: int, columns: int, group: int):
    """Within half a step of the scale; columns that do not fill a word too."""
    weight = noise(rows, columns)
    parts = pack_int4(weight, group)
    back = unpack_int4(parts["weight_packed"], parts["weight_scale"], (rows, columns))
    step = parts["weight_scale"].float().repeat_interleave(group, 1)
    assert ((back - weight).abs() <= 0.53 * step).all()


@pytest.mark.parametrize("shape", [(130, 257), (128, 128), (5, 7)])
def test_fp8_blocks(shape: tuple[int, int]):
    """weight = fp8 * scale_inv of its block of 128 x 128, at ragged edges too."""
    weight = noise(*shape)
    packed, scale = pack_fp8(weight, 128)
    back = dequantise_fp8(packed, scale)
    row, column = shape[0] - 1, shape[1] - 1
    last = packed[row, column].float() * scale[row // 128, column // 128]
    assert float(back[row, column]) == float(last)
    assert ((back - weight).abs() <= weight.abs() / 16 + 1e-3).all()


def quantised_folder(tmp_path: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """A folder whose experts are packed, and what their tensors must be after loading."""
    folder = tmp_path / kind
    save_model(make_model(MLA), folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    expected: dict[str, Tensor] = {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        weight, stem = tensors.pop(name), name.removesuffix(".weight")
        if kind == "int4":
            parts = pack_int4(weight, 16)
            tensors.update({f"{stem}.{part}": tensor for part, tensor in parts.items()})
            shape = (weight.shape[0], weight.shape[1])
            expected[name] = unpack_int4(parts["weight_packed"], parts["weight_scale"], shape)
        else:
            tensors[name], tensors[f"{name}_scale_inv"] = pack_fp8(weight, 16)
            expected[name] = dequantise_fp8(tensors[name], tensors[f"{name}_scale_inv"], 16)
    config["quantization_config"] = (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        if kind == "int4"
        else {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    )
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder, expected


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_folders_are_dequantised_on_load(kind: str, tmp_path: Path):
    """Packed experts beside plain attention, as released; the rest is untouched."""
    folder, expected = quantised_folder(tmp_path, kind)
    _, source = open_checkpoint(folder)
    stored = {name: entry.stored for name, entry in source.entries.items()}
    assert {stored[name] for name in expected} == {kind.upper()}
    model, plain = load_model(folder).state_dict(), make_model(MLA).state_dict()
    width = MLA.moe_intermediate_size
    stack = model["layers.2.mlp.experts_gate_up_proj"]
    prefix = "model.layers.2.mlp.experts.3"
    assert torch.equal(stack[3, :width], expected[f"{prefix}.gate_proj.weight"])
    assert torch.equal(stack[3, width:], expected[f"{prefix}.up_proj.weight"])
    for name, tensor in plain.items():
        if "experts_" not in name:
            assert torch.equal(model[name], tensor)


def without(suffix: str) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith(suffix))]

    return change


def narrow(suffix: str) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(suffix))
        tensors[name] = tensors[name][:, :-1].contiguous()

    return change


def zero_point(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.0.up_proj.weight_zero_point"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("int4", without("weight_scale"), "weight_scale is missing"),
        ("int4", without("weight_shape"), "weight_shape is missing"),
        ("int4", without("weight_packed"), "is unknown|is missing"),
        ("int4", narrow("weight_packed"), "does not hold"),
        ("int4", zero_point, "asymmetric"),
        ("fp8", without("weight_scale_inv"), "weight_scale_inv is missing"),
        ("fp8", narrow("weight_scale_inv"), "one number for each 16 x 16"),
    ],
)
def test_incomplete_packs_are_named(kind: str, change: Any, words: str, tmp_path: Path):
    """A packed tensor without its companions is not read as numbers."""
    folder, _ = quantised_folder(tmp_path, kind)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)


def replaced(suffix: str, tensor: Tensor) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[next(name for name in tensors if name.endswith(suffix))] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced("weight_shape", torch.tensor([32])), r"weight_shape is \[1\] of I64"),
        (replaced("weight_shape", torch.tensor([32.0, 48.0])), "weight_shape is .* of F32"),
        (replaced("weight_shape", torch.tensor([-32, 48])), "does not hold -32 x 48"),
        (replaced("weight_shape", torch.tensor([2**60, 2**60])), "does not hold"),
        (replaced("weight_scale", torch.zeros(32, 0)), "does not hold"),
        (replaced("weight_scale", torch.zeros(32)), "does not hold"),
        (replaced("weight_scale", torch.zeros(32, 3, dtype=torch.int64)), "of I64 does not hold"),
        (replaced("weight_packed", torch.zeros(32, 6)), "of F32 with"),
    ],
)
def test_malformed_packs_are_named(change: Any, words: str, tmp_path: Path):
    """Shapes and kinds that no packer writes."""
    folder, _ = quantised_folder(tmp_path, "int4")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)


@pytest.mark.parametrize("block", [[0, 0], ["128", "128"], [16, 32], [], 16, [-1, -1]])
def test_blocks_that_are_none(block: Any, tmp_path: Path):
    """The value and what was expected."""
    folder, _ = quantised_folder(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected two equal numbers"):
        load_model(folder)
