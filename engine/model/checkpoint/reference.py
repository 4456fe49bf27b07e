"""Logits of transformers' own classes for a checkpoint, to compare ours with."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint.hub_config import MLA_TYPES, OWN_TYPE, read_config, text_config
from engine.model.checkpoint.load import open_checkpoint, quantisation
from engine.model.checkpoint.save import convert

_NOT_THEIRS = ("quantization_config", "auto_map", "architectures", "dtype", "torch_dtype")


def reference_logits(path: Path, ids: Tensor) -> Tensor:
    """ids int64 [B, T] -> fp32 [B, T, V] of DeepseekV3ForCausalLM or LlamaForCausalLM.

    A folder that they cannot read as it is (kimi_k2, K2.5's prefix, INT4, FP8) is dequantised into
    a temporary folder (fp32: set TMPDIR to a disk with room) under its own config.json with another
    ``model_type``. CheckpointError for a type that transformers does not have.
    """
    if path.suffix == ".gguf":
        return _logits("llama", path.parent, ids, gguf_file=path.name)
    raw = read_config(path)
    inner = dict(text_config(raw, str(path / "config.json")))
    kind = inner.get("model_type")
    if kind == OWN_TYPE:
        raise CheckpointError(
            f"{path}: transformers has no model of type {OWN_TYPE} to compare with; leave out "
            "--reference, or verify the checkpoint this one was made from"
        )
    if inner == raw and kind != "kimi_k2" and quantisation(raw) is None:
        return _logits(str(kind), path, ids)
    config, source = open_checkpoint(path)
    name = "deepseek_v3" if kind in MLA_TYPES else "llama"
    with tempfile.TemporaryDirectory(prefix="parl-reference-") as temporary:
        folder = Path(temporary) / "model"
        convert(config, source, folder, dtype=torch.float32, model_type=name)
        # their reading of the file's own words, not of ours
        theirs = {key: value for key, value in inner.items() if key not in _NOT_THEIRS}
        text = json.dumps({**theirs, "model_type": name})
        (folder / "config.json").write_text(text)
        return _logits(name, folder, ids)


def _logits(kind: str, folder: Path, ids: Tensor, **options: Any) -> Tensor:
    from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM

    owner = DeepseekV3ForCausalLM if kind in MLA_TYPES else LlamaForCausalLM
    loaded: Any = owner.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True, **options
    )
    model, loading = loaded
    lacking = sorted(loading["missing_keys"]) + sorted(loading["mismatched_keys"])
    if lacking:
        raise CheckpointError(
            f"{folder}: transformers found no tensor for {lacking[0]} ({len(lacking)} in all) and "
            "would draw it at random; there is nothing to compare with"
        )
    with torch.no_grad():
        return model.eval()(ids).logits
