"""A learner's whole state as safetensors plus a small JSON: no pickle, exact to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.model import PolicyModel
from parl.errors import CheckpointError
from parl.learner.optim.muon import Muon

WEIGHTS, OPTIMIZER, META = "model.safetensors", "optimizer.safetensors", "learner.json"
EXPERT_CLIP = "expert_clip"
FORMAT = 2
META_KEYS = ("num_updates", "rates", "model", "sha256")


def save_state(
    model: PolicyModel,
    muon: Muon,
    adamw: torch.optim.AdamW,
    num_updates: int,
    folder: Path,
    expert_clip: Mapping[str, Tensor] | None = None,
) -> None:
    """Write WEIGHTS, OPTIMIZER and META into ``folder``; META holds the others' sha256."""
    weights = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    optimizer = _optimizer_tensors(model, muon, adamw)
    optimizer |= {f"{EXPERT_CLIP}|all|{k}": v for k, v in (expert_clip or {}).items()}
    save_file(optimizer, folder / OPTIMIZER)
    meta = {
        "format": FORMAT,
        "num_updates": num_updates,
        "rates": [group["lr"] for group in _groups(muon, adamw)],
        "model": model.config.model_dump(mode="json"),
        "sha256": {name: _sha256(folder / name) for name in (WEIGHTS, OPTIMIZER)},
    }
    (folder / META).write_text(json.dumps(meta, indent=1))


def load_state(
    model: PolicyModel, muon: Muon, adamw: torch.optim.AdamW, folder: Path
) -> tuple[int, dict[str, Tensor]]:
    """Exact inverse of ``save_state``; returns num_updates and the state of expert clipping.
    CheckpointError, with everything as it was, when a file is missing, damaged or of another
    model."""
    meta = _read_meta(folder)
    mine = model.config.model_dump(mode="json")
    if meta["model"] != mine:
        names = sorted({*mine, *meta["model"]})
        name = next(n for n in names if meta["model"].get(n) != mine.get(n))
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {name} is {meta['model'].get(name)}, this "
            f"run has {mine.get(name)}; use the config the checkpoint was made with"
        )
    for name, expected in meta["sha256"].items():
        found = _sha256(folder / name)
        if found != expected:
            raise CheckpointError(
                f"checkpoint {folder}: {name} has sha256 {found[:12]}, {META} says "
                f"{expected[:12]}; the file is damaged, restore it from a copy"
            )
    model.load_state_dict(load_file(folder / WEIGHTS))
    for group, rate in zip(_groups(muon, adamw), meta["rates"], strict=True):
        group["lr"] = rate
    muon.state.clear()
    adamw.state.clear()
    parameters = dict(model.named_parameters())
    expert_clip: dict[str, Tensor] = {}
    for key, tensor in load_file(folder / OPTIMIZER).items():
        kind, name, field = key.split("|")
        if kind == EXPERT_CLIP:
            expert_clip[field] = tensor
            continue
        optimizer = muon if kind == "muon" else adamw
        optimizer.state[parameters[name]][field] = tensor
    return int(meta["num_updates"]), expert_clip


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(folder, META, error) from error
    found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder}: {META} has format {found}, this code reads {FORMAT}; use the "
            "commit that wrote it"
        )
    missing = [key for key in META_KEYS if key not in meta]
    if missing:
        raise CheckpointError(
            f"checkpoint {folder}: {META} lacks {missing[0]}; restore the folder from a copy"
        )
    return meta


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path.parent, path.name, error) from error


def _unreadable(folder: Path, name: str, error: Exception) -> CheckpointError:
    why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
    return CheckpointError(
        f"checkpoint {folder}: {name} cannot be read ({why}); restore the folder from a copy"
    )


def _groups(muon: Muon, adamw: torch.optim.AdamW) -> list[dict[str, Any]]:
    return [*muon.param_groups, *adamw.param_groups]


def _optimizer_tensors(
    model: PolicyModel, muon: Muon, adamw: torch.optim.AdamW
) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{kind}|{names[id(parameter)]}|{field}": torch.as_tensor(value).detach().contiguous()
        for kind, optimizer in (("muon", muon), ("adamw", adamw))
        for parameter, fields in optimizer.state.items()
        for field, value in fields.items()
    }
