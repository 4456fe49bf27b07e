"""Where tensors come from: a folder of safetensors, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint.names import PREFIX

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor under its hub name; ``read`` gives it on the CPU, dequantised."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    stored: str
    """Format on disk: BF16, F32, INT4, FP8, Q4_1 ..."""


class TensorSource(Protocol):
    """A checkpoint."""

    @property
    def where(self) -> str:
        """What messages call it."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By hub name."""
        ...


class SafetensorsFolder:
    """``model.safetensors.index.json`` with its shards, or every *.safetensors of the folder.

    Only the shard read last is open: memory maps of the others would count as resident.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._open: tuple[str, safe_open] | None = None
        self.entries: dict[str, Entry] = {}
        for shard, expected in sorted(self._shards().items()):
            self._add_shard(shard, expected)

    def _shards(self) -> dict[str, set[str] | None]:
        """File name -> the tensors that the index expects in it, None without an index."""
        index = self._folder / INDEX
        if not index.exists():
            names = sorted(path.name for path in self._folder.glob("*.safetensors"))
            if not names:
                raise CheckpointError(
                    f"{self._folder} has no *.safetensors; expected a hub folder (pickled "
                    ".bin checkpoints are not read: convert them with transformers first)"
                )
            return dict.fromkeys(names)
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except OSError as error:
            raise CheckpointError(f"{index}: {error.strerror}; download it again") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} has no weight_map; download it again") from error
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is no object with tensors; download again")
        shards: dict[str, set[str] | None] = {}
        for name, shard in weight_map.items():
            # a shard elsewhere would let a folder from the net read any file of this machine
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(
                    f"{index}: {name} is said to be in {shard!r}; expected the name of a file "
                    "beside the index"
                )
            expected = shards.setdefault(shard, set())
            assert expected is not None, "set on the line before"
            expected.add(name)
        return shards

    def _add_shard(self, shard: str, expected: set[str] | None) -> None:
        file = self._file(shard)
        found = set(file.keys())
        if expected is not None and not expected <= found:
            missing = sorted(expected - found)
            raise CheckpointError(
                f"{self._folder / shard} lacks {missing[0]} ({len(missing)} tensors in all), which "
                f"{INDEX} says it holds; download it again"
            )
        for stored in found if expected is None else expected:
            header = file.get_slice(stored)
            self.entries[stored.removeprefix(PREFIX)] = Entry(
                tuple(header.get_shape()),
                lambda stored=stored: self._file(shard).get_tensor(stored),
                header.get_dtype(),
            )

    def _file(self, shard: str) -> safe_open:
        if self._open is None or self._open[0] != shard:
            path = self._folder / shard
            try:
                self._open = (shard, safe_open(path, framework="pt"))
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is missing; download it again") from error
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged ({error}); download it again") from error
        return self._open[1]


def read_finite(source: TensorSource, name: str) -> Tensor:
    """The tensor; CheckpointError when it holds NaN or infinity, which one matrix product would
    spread over every logit, or integers."""
    tensor = source.entries[name].read()
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{source.where}: {name} is stored as {source.entries[name].stored}; expected floating "
            "point, or a quantised format that config.json declares"
        )
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{source.where}: {name} holds {bad} NaN or infinite values of {tensor.numel()}; the "
            "checkpoint is damaged or diverged: take another copy"
        )
    return tensor
