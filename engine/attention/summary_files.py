"""Files of summary adapters: safetensors with a manifest that says what they fit.

The manifest is JSON under the key ``parl`` of the file's metadata: format, kind, geometry, hash of
the model that they were trained with, encoder name and dimension. Everything is checked before a
tensor is used; a mismatch is one line that names both sides.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.attention.summary_adapters import Adapters, AnchorAdapters, Geometry, MeanAdapters
from engine.errors import AttentionError
from engine.kvcache.router.encoder import SummaryEncoder, check_encoder

FORMAT = "parl-summary-adapters-1"
MEANS = "block-means"
"""Encoder name of adapters that read the means of keys and values."""


def model_hash(tensors: Mapping[str, Tensor]) -> str:
    """Of a model's attention weights: summaries stand for keys that these made."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if ".self_attn." in name:
            tensor = tensors[name].detach().float().cpu().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.numpy().data)
    return digest.hexdigest()


def save_adapters(adapters: Adapters, path: Path, trained_with: str) -> None:
    """``trained_with``: ``model_hash`` of the base model."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "model_hash": trained_with,
        "geometry": asdict(adapters.geometry),
        "encoder": {"name": MEANS, "dimension": adapters.geometry.features},
    }
    if isinstance(adapters, AnchorAdapters):
        manifest["encoder"] = {"name": adapters.encoder, "dimension": adapters.dimension}
        manifest["hidden"] = adapters.trunk.shape[1]
    tensors = {name: t.detach().contiguous() for name, t in adapters.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # a run that is stopped while it writes must not leave half a file under the name
    part = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(tensors, part, metadata={"parl": json.dumps(manifest)})
    part.replace(path)


def load_adapters(
    path: Path,
    geometry: Geometry,
    *,
    trained_with: str | None = None,
    encoder: SummaryEncoder | None = None,
) -> Adapters:
    """Frozen, for reading. ``trained_with``: the base model's hash, None where its weights may have
    been trained on since. ``encoder``: who makes the vectors at run time, None: means do.
    AttentionError, one line, for anything that does not fit."""
    manifest, tensors = _read(path)
    _check(path, manifest, geometry, trained_with)
    name, dimension = manifest["encoder"]["name"], int(manifest["encoder"]["dimension"])
    ours = MEANS if encoder is None else encoder.name
    if name != ours:
        raise AttentionError(
            f"{path} was trained on vectors of encoder {name!r}, but {ours!r} makes them here; use "
            "that encoder, or adapters of this one"
        )
    if encoder is None:
        made: Adapters = MeanAdapters(geometry)
    else:
        check_encoder(encoder, dimension)
        made = AnchorAdapters(geometry, name, dimension, int(manifest["hidden"]))
    wanted = {name: tuple(t.shape) for name, t in made.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if wanted != found:
        wrong = sorted(n for n in wanted | found if wanted.get(n) != found.get(n))
        raise AttentionError(
            f"{path}: tensor {wrong[0]} has shape {found.get(wrong[0])}, expected "
            f"{wanted.get(wrong[0])}; the file is damaged or was made by other code: train anew"
        )
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise AttentionError(f"{path}: {broken[0]} holds NaN or infinity; train the adapters anew")
    made.load_state_dict(tensors)
    return made.requires_grad_(False).eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise AttentionError(
            f"summary adapters {path}: no such file; make one with `parl attention train-summaries`"
        )
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            manifest = json.loads(metadata.get("parl", "{}"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise AttentionError(
            f"{path} is not a whole safetensors file ({error}); train the adapters anew"
        ) from error
    if manifest.get("format") != FORMAT:
        raise AttentionError(
            f"{path} has format {manifest.get('format')!r}, expected {FORMAT!r}; it is no file of "
            "`parl attention train-summaries` of this version"
        )
    return manifest, tensors


def _check(
    path: Path, manifest: dict[str, Any], geometry: Geometry, trained_with: str | None
) -> None:
    ours, theirs = asdict(geometry), dict(manifest["geometry"])
    theirs["frequencies"] = tuple(theirs["frequencies"])
    for field, value in ours.items():
        if theirs.get(field) != value:
            shown = (theirs.get(field), value)
            if field == "frequencies":
                shown = (f"{len(theirs[field])} others", f"{len(ours[field])} of its own")
            raise AttentionError(
                f"{path} was trained for a model with {field}={shown[0]}, this one has {shown[1]}; "
                "train adapters for this model"
            )
    if trained_with is not None and manifest["model_hash"] != trained_with:
        raise AttentionError(
            f"{path} was trained with attention weights {manifest['model_hash'][:12]}, this model "
            f"has {trained_with[:12]}; train adapters for this model"
        )
