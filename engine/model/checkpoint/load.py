"""A checkpoint into a PolicyModel: one hub tensor at a time, checked before any is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.model.checkpoint import hub_config
from engine.model.checkpoint.gguf import GGUFFile
from engine.model.checkpoint.names import hub_shapes, is_skipped, pieces
from engine.model.checkpoint.quantised import FP8_BLOCK, Dequantised
from engine.model.checkpoint.sizes import check_extent
from engine.model.checkpoint.source import SafetensorsFolder, TensorSource, read_finite
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel

Device = str | int | torch.device
DeviceMap = Mapping[str, Device] | Literal["auto"] | Device
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def open_checkpoint(path: Path) -> tuple[ModelConfig, TensorSource]:
    """A hub folder or a .gguf file -> (config, tensors by hub name, dequantised when read)."""
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        return file.config, file
    raw, where = hub_config.read_config(path), str(path / "config.json")
    config = hub_config.from_hub(raw, where)
    return config, Dequantised(SafetensorsFolder(path), _fp8_block(raw, where))


def quantisation(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """quantization_config of config.json, which multimodal models keep in their text_config."""
    given = hub_config.text_config(raw).get("quantization_config") or raw.get("quantization_config")
    return given if isinstance(given, Mapping) else None


def _fp8_block(raw: Mapping[str, Any], where: str) -> int:
    """CheckpointError for a quantisation that we cannot undo."""
    given = quantisation(raw)
    if given is None:
        return FP8_BLOCK
    method, layout = given.get("quant_method"), given.get("format")
    if method == "compressed-tensors" and layout == "pack-quantized":
        return FP8_BLOCK
    block = given.get("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    if method == "fp8":
        sizes = block if isinstance(block, list) and len(block) == 2 else [0, 0]
        if type(sizes[0]) is int and sizes[0] == sizes[1] > 0:
            return sizes[0]
        raise CheckpointError(
            f"{where}: weight_block_size={block!r}: expected two equal numbers, such as [128, 128]"
        )
    raise CheckpointError(
        f"{where}: quant_method={method!r} format={layout!r} is not supported; expected "
        "compressed-tensors pack-quantized (INT4) or fp8 with square blocks"
    )


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """CheckpointError for fp16 and anything else that a policy must not be kept in."""
    if dtype is torch.float16:
        raise CheckpointError(
            "float16 is refused: its largest number is 65,504 and K2-class activations pass it, so "
            "logits turn infinite; use bfloat16 (released) or float32"
        )
    if dtype not in DTYPES.values():
        raise CheckpointError(f"dtype {dtype} is not supported; expected bfloat16 or float32")
    return dtype


def check_names(config: ModelConfig, source: TensorSource) -> PolicyModel:
    """The model on the meta device, after its tensors were found in the source by name and shape;
    CheckpointError names the first that is missing, unknown or of another shape."""
    check_extent(config, source)
    with torch.device("meta"):
        model = PolicyModel(config, seed=None)
    wanted = hub_shapes({name: tuple(t.shape) for name, t in model.state_dict().items()})
    given = source.entries
    missing = [name for name in wanted if name not in given]
    if missing:
        raise CheckpointError(
            f"{source.where}: {missing[0]} is missing ({len(missing)} of {len(wanted)} tensors in "
            "all); the checkpoint is incomplete or its config.json is of another model"
        )
    extra = sorted(n for n in given if n not in wanted and not is_skipped(n, config))
    if extra:
        raise CheckpointError(
            f"{source.where}: {extra[0]} is unknown ({len(extra)} tensors in all); this model has "
            "no place for it: check config.json"
        )
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise CheckpointError(
                f"{source.where}: {name} is {list(given[name].shape)}, config.json makes it "
                f"{list(shape)}; the config is of another model"
            )
    return model


def check_tied(config: ModelConfig, source: TensorSource) -> None:
    """CheckpointError when a tied model comes with a head of its own that is another matrix:
    leaving it out would change every logit."""
    if not config.tie_word_embeddings or HEAD not in source.entries:
        return
    if not torch.equal(source.entries[HEAD].read(), source.entries[EMBEDDING].read()):
        raise CheckpointError(
            f"{source.where}: config.json says tie_word_embeddings, but {HEAD} differs from "
            f"{EMBEDDING}; set tie_word_embeddings to false to use it"
        )


def load_model(
    path: Path, *, dtype: torch.dtype = torch.float32, device_map: DeviceMap | None = None
) -> PolicyModel:
    """Read a hub folder (safetensors; INT4 and FP8 are dequantised) or a Llama-family GGUF file.

    ``dtype`` bfloat16 or float32; the router's bias is always float32. ``device_map``: a device,
    names of modules to devices, or "auto" (accelerate fills GPUs first, then memory). Besides the
    model, memory holds one hub tensor: an expert's matrix, at most the embedding.
    """
    config, source = open_checkpoint(path)
    return load_tensors(config, source, dtype=dtype, device_map=device_map)


def load_tensors(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: torch.dtype = torch.float32,
    device_map: DeviceMap | None = None,
) -> PolicyModel:
    """``load_model`` from a source that is open."""
    check_dtype(dtype)
    model = check_names(config, source)
    check_tied(config, source)
    devices = _devices(model, dtype, device_map)
    for name, empty in list(model.state_dict().items()):
        bias = name.endswith("e_score_correction_bias")
        tensor = torch.empty(
            empty.shape,
            dtype=torch.float32 if bias else dtype,
            device=_device_of(name, devices),
        )
        for piece in pieces(name, tuple(empty.shape)):
            tensor[piece.index].copy_(read_finite(source, piece.name))
        _set(model, name, tensor)
    model.rotary.materialise(_device_of("embed_tokens", devices))
    return model


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        setattr(module, leaf, tensor)
    else:
        setattr(module, leaf, nn.Parameter(tensor))


def _devices(
    model: PolicyModel, dtype: torch.dtype, device_map: DeviceMap | None
) -> dict[str, Device]:
    """Module name -> device; "" = all."""
    if device_map is None:
        return {"": "cpu"}
    if device_map == "auto":
        from accelerate import infer_auto_device_map

        found = infer_auto_device_map(model, no_split_module_classes=["Layer"], dtype=dtype)
        if "disk" in found.values():
            raise CheckpointError(
                "the model does not fit into this machine's memory and GPUs; take bfloat16, a "
                "smaller model or more machines (layers on disk are not supported)"
            )
        return dict(found)
    if isinstance(device_map, Mapping):
        return dict(device_map)
    return {"": device_map}


def _device_of(name: str, devices: Mapping[str, Device]) -> Device:
    """Of the longest prefix of ``name`` that the map has."""
    path = name
    while path not in devices:
        if not path:
            raise CheckpointError(
                f"device_map has no device for {name}; add '' for everything that is not named"
            )
        path = path.rpartition(".")[0]
    return devices[path]
