"""A PolicyModel, or tensors that stream by, into a hub folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint import hub_config
from engine.model.checkpoint.load import check_dtype, check_names, check_tied
from engine.model.checkpoint.names import hub_shapes, pieces
from engine.model.checkpoint.source import INDEX, TensorSource, read_finite
from engine.model.checkpoint.staging import staged
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel

MAX_SHARD_BYTES = 4 * 1024**3


Beside = Callable[[Path], None]
"""Writes what else belongs to the model (tokenizer, generation config) into a folder. It runs
before the tensors are written, and what it writes appears with them or not at all."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that will be written: its hub name, size in bytes, and how to get it."""

    name: str
    num_bytes: int
    read: Callable[[], Tensor]


def save_model(
    model: PolicyModel,
    folder: Path,
    *,
    model_type: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
) -> list[Path]:
    """Write config.json and model.safetensors, or numbered shards with their index.

    ``model_type``: what config.json calls it, by default the type that other software knows
    (kimi_k2, llama). ``extra`` adds fields to config.json. Memory holds one shard beside the model.
    CheckpointError when the folder holds a model already, for fp16, for NaN and when the disk is
    full; then the folder is as it was before.
    """
    dtype = check_dtype(model.embed_tokens.dtype)
    config = hub_config.to_hub(model.config, model_type)
    config.update(dtype=str(dtype).removeprefix("torch."), **(extra or {}))
    return write_folder(folder, config, list(_from_model(model)), max_shard_bytes, beside)


def _from_model(model: PolicyModel) -> Iterator[Pending]:
    for name, tensor in model.state_dict().items():
        for piece in pieces(name, tuple(tensor.shape)):
            part = tensor[piece.index] if piece.index else tensor
            yield Pending(piece.name, part.nbytes, lambda part=part: part.detach().cpu())


def convert(
    config: ModelConfig,
    source: TensorSource,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    model_type: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
) -> list[Path]:
    """Any checkpoint we read -> a safetensors hub folder in ``dtype``; memory holds one shard.

    Options and errors as in ``save_model``; ``hub_config.kept`` says what ``extra`` should hold.
    """
    check_dtype(dtype)
    model = check_names(config, source)
    check_tied(config, source)
    shapes = hub_shapes({name: tuple(t.shape) for name, t in model.state_dict().items()})
    pending = []
    for name, shape in shapes.items():
        kind = torch.float32 if name.endswith("_bias") else dtype

        def read(name: str = name, kind: torch.dtype = kind) -> Tensor:
            return read_finite(source, name).to(kind)

        pending.append(Pending(name, torch.Size(shape).numel() * kind.itemsize, read))
    hub = hub_config.to_hub(config, model_type)
    hub.update(dtype=str(dtype).removeprefix("torch."), **(extra or {}))
    return write_folder(folder, hub, pending, max_shard_bytes, beside)


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: list[Pending],
    max_shard_bytes: int,
    beside: Beside | None = None,
) -> list[Path]:
    """The files written, all of them or none."""
    with staged(folder) as inside:
        old = [p.name for p in folder.iterdir() if p.suffix == ".safetensors" or p.name == INDEX]
        if old:
            raise CheckpointError(
                f"{folder} holds a model already ({old[0]}); take an empty folder"
            )
        _check_room(folder, sum(pending.num_bytes for pending in tensors))
        if beside is not None:
            beside(inside)
        written = _write(inside, folder, tensors, max_shard_bytes)
        path = inside / "config.json"
        path.write_text(json.dumps(config, indent=2) + "\n")
    return [folder / path.name for path in [*written, path]]


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the tensors take {needed / 1024**3:.2f} GiB, {free / 1024**3:.2f} GiB are "
            "free there; give a folder on another disk, or bfloat16"
        )


def _write(inside: Path, folder: Path, tensors: list[Pending], max_shard_bytes: int) -> list[Path]:
    """The shards and their index into ``inside``; messages say ``folder``."""
    shards = list(_shards(tensors, max_shard_bytes))
    written, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        contents = {pending.name: _checked(pending, folder) for pending in shard}
        save_file(contents, inside / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(contents, name))
        written.append(inside / name)
    if len(shards) > 1:
        total = sum(pending.num_bytes for pending in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        written.append(inside / INDEX)
        written[-1].write_text(json.dumps(index, indent=2) + "\n")
    return written


def _checked(pending: Pending, folder: Path) -> Tensor:
    # a copy: views of one stack would each write the whole stack
    tensor = pending.read().clone(memory_format=torch.contiguous_format)
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{folder}: {pending.name} holds NaN or infinity and is not saved; the training "
            "diverged: go back to an older checkpoint"
        )
    return tensor


def _shards(tensors: Iterable[Pending], limit: int) -> Iterator[list[Pending]]:
    """Consecutive tensors of at most ``limit`` bytes together, one at least."""
    shard: list[Pending] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    if shard:
        yield shard
