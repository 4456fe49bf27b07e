"""A model repository for Triton Inference Server: LightEngine behind Triton's Python backend.

<repository>/parl_mri/config.pbtxt    one call in, any number of answers out
<repository>/parl_mri/1/model.py      names engine.adapters.triton_model
<repository>/parl_mri/1/engine.json   EngineConfig
<repository>/parl_mri/1/model         the hub folder, copied or linked
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import CheckpointError

MODEL = "parl_mri"
CALL, TENSORS, ANSWER = "call", "tensors", "answer"
_CONFIG = """\
# MRI over KServe v2: "call" holds one verb as JSON, "tensors" a weight set where there is one.
name: "parl_mri"
backend: "python"
max_batch_size: 0
# answers come when they are ready, in any order: a step must not hold up others
model_transaction_policy { decoupled: True }
input [
  { name: "call" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "tensors" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }
]
output [
  { name: "answer" data_type: TYPE_STRING dims: [ 1 ] }
]
# one engine: contexts and weights are its own
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
_MODEL = '''\
"""Triton loads this file; the engine must be importable: installed, or on PYTHONPATH."""

import os
import sys

# Triton's stub embeds Python and does not read it
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from engine.adapters.triton_model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
'''


def export_repository(
    model: Path, repository: Path, config: EngineConfig | None = None, *, link: bool = False
) -> Path:
    """Write the repository; returns the folder of the model in it.

    ``model``: a hub folder. ``link``: point to it instead of copying, for a server on this machine.
    CheckpointError when it is none, or the repository holds this model already.
    """
    from engine.model.checkpoint.load import open_checkpoint

    if not model.is_dir():
        raise CheckpointError(f"{model}: expected a hub folder; parl model convert makes one")
    own, _ = open_checkpoint(model)
    config = config or EngineConfig(max_context=min(512, own.max_position_embeddings))
    if config.max_context > own.max_position_embeddings:
        raise CheckpointError(
            f"max_context={config.max_context} exceeds the model's {own.max_position_embeddings} "
            "positions; lower it"
        )
    folder = repository / MODEL
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; take an empty repository")
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG)
    (version / "model.py").write_text(_MODEL)
    (version / "engine.json").write_text(config.model_dump_json(indent=2) + "\n")
    if link:
        (version / "model").symlink_to(model.resolve(), target_is_directory=True)
    else:
        shutil.copytree(model, version / "model")
    return folder


def read_engine(version: Path) -> EngineConfig:
    return EngineConfig.model_validate(json.loads((version / "engine.json").read_text()))
