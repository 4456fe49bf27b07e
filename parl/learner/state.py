"""A learner's whole state as safetensors plus a small JSON: no pickle, exact to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from parl.errors import CheckpointError

if TYPE_CHECKING:
    from parl.learner.learner import TokenLearner

WEIGHTS, OPTIMIZER, META = "model.safetensors", "optimizer.safetensors", "learner.json"
FORMAT = 1


def save_state(learner: TokenLearner, folder: Path) -> None:
    """Write WEIGHTS, OPTIMIZER and META into ``folder``."""
    weights = {k: v.detach().contiguous() for k, v in learner.model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    save_file(_optimizer_tensors(learner), folder / OPTIMIZER)
    meta = {
        "format": FORMAT,
        "num_updates": learner.num_updates,
        "rates": [group["lr"] for group in _groups(learner)],
        "model": learner.model.config.model_dump(mode="json"),
    }
    (folder / META).write_text(json.dumps(meta, indent=1))


def load_state(learner: TokenLearner, folder: Path) -> None:
    """Exact inverse of ``save_state``; CheckpointError when files or shapes do not fit."""
    try:
        meta = json.loads((folder / META).read_text())
        weights = load_file(folder / WEIGHTS)
        state = load_file(folder / OPTIMIZER)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {error}; expected {META}, {WEIGHTS} and "
            f"{OPTIMIZER} as `parl rl run` writes them"
        ) from error
    mine = learner.model.config.model_dump(mode="json")
    if meta["model"] != mine:
        differing = sorted(k for k in mine if meta["model"].get(k) != mine[k])
        name = differing[0] if differing else "format"
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {name} is {meta['model'].get(name)}, this "
            f"run has {mine.get(name)}; use the config the checkpoint was made with"
        )
    learner.model.load_state_dict(weights)
    learner.reset_optimizers()
    for group, rate in zip(_groups(learner), meta["rates"], strict=True):
        group["lr"] = rate
    names = dict(learner.model.named_parameters())
    for key, tensor in state.items():
        kind, name, field = key.split("|")
        optimizer = learner.muon if kind == "muon" else learner.adamw
        optimizer.state[names[name]][field] = tensor
    learner.num_updates = meta["num_updates"]


def _groups(learner: TokenLearner) -> list[dict]:
    return [*learner.muon.param_groups, *learner.adamw.param_groups]


def _optimizer_tensors(learner: TokenLearner) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    return {
        f"{kind}|{names[id(parameter)]}|{field}": torch.as_tensor(value).detach().contiguous()
        for kind, optimizer in (("muon", learner.muon), ("adamw", learner.adamw))
        for parameter, fields in optimizer.state.items()
        for field, value in fields.items()
    }
