"""What a config may ask for, checked before anything is allocated or looped over.

A damaged or hostile number is refused twice: against bounds far above every released model, and
against the names and shapes of the tensors that come with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import CheckpointError
from engine.model.checkpoint.source import TensorSource
from engine.model.config import ModelConfig

_SIZE, _HEAD = 2**20, 2**14
BOUNDS = {
    "vocab_size": 2**24,
    "hidden_size": _SIZE,
    "num_hidden_layers": 1024,
    "intermediate_size": _SIZE,
    "moe_intermediate_size": _SIZE,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**10,
    "num_attention_heads": _HEAD,
    "num_key_value_heads": _HEAD,
    "head_dim": _HEAD,
    "q_lora_rank": _SIZE,
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _HEAD,
    "qk_rope_head_dim": _HEAD,
    "v_head_dim": _HEAD,
    "max_position_embeddings": 2**22,
}
"""Products of these fit into 63 bits; 2^22 positions of 64 frequencies are tables of 2 GiB."""
_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.")


def check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Fields by ModelConfig's names, of any JSON type; CheckpointError names ``where``, the field
    and its value when it is not finite, absurdly large or outside the vocabulary."""
    for name, value in _numbers(fields):
        if not math.isfinite(value):
            raise CheckpointError(f"{where}: {name}={value}: expected a finite number")
    for name, most in BOUNDS.items():
        value = fields.get(name)
        if isinstance(value, int | float) and value > most:
            raise CheckpointError(
                f"{where}: {name}={value}: expected at most {most}; the file is damaged or of a "
                "model that we do not have"
            )
    theta = fields.get("rope_theta")
    if isinstance(theta, int | float) and theta <= 1:
        raise CheckpointError(f"{where}: rope_theta={theta}: expected more than 1")
    vocabulary = fields.get("vocab_size")
    for name in ("bos_token_id", "eos_token_id"):
        given = fields.get(name)
        for token in given if isinstance(given, list) else [given]:
            if not isinstance(token, int) or not isinstance(vocabulary, int):
                continue
            if not 0 <= token < vocabulary:
                raise CheckpointError(
                    f"{where}: {name}={token} is outside the vocabulary of {vocabulary}"
                )


def _numbers(fields: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, float):
            yield name, value


def check_extent(config: ModelConfig, source: TensorSource) -> None:
    """CheckpointError when the config has more layers or experts than the tensors, or an embedding
    of another shape: then nothing else needs to be compared, name by name."""
    layers = _count(_LAYER, source)
    _fits(source, "num_hidden_layers", config.num_hidden_layers, layers, "layers")
    if config.num_moe_layers:
        experts = _count(_EXPERT, source)
        _fits(source, "n_routed_experts", config.n_routed_experts, experts, "experts in a layer")
    embedding = source.entries.get(_EMBEDDING)
    expected = (config.vocab_size, config.hidden_size)
    if embedding is not None and embedding.shape != expected:
        raise CheckpointError(
            f"{source.where}: {_EMBEDDING} is {list(embedding.shape)}, config.json makes it "
            f"{list(expected)} (vocab_size, hidden_size); the config is of another model"
        )


def _count(pattern: re.Pattern[str], source: TensorSource) -> int:
    """One more than the largest index in the names."""
    found = (pattern.match(name) for name in source.entries)
    return 1 + max((int(match[1]) for match in found if match is not None), default=-1)


def _fits(source: TensorSource, field: str, asked: int, found: int, what: str) -> None:
    if asked > found:
        raise CheckpointError(
            f"{source.where}: config.json says {field}={asked}, the tensors are missing: they have "
            f"{found} {what}; the checkpoint is incomplete or its config.json is of another model"
        )
