"""Llama-family models in GGUF files (SmolLM2): tensors dequantised, names and rows as on the hub.

llama.cpp reorders the rows of q and k of each head so that its interleaved rotation equals the
hub's half-split one; that is undone here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint.hub_config import checked
from engine.model.checkpoint.source import Entry
from engine.model.config import ModelConfig

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """One file with its config; the tensors are memory-mapped until they are read."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.where = str(path)
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{path} is not a readable GGUF file ({type(error).__name__}: {error}); download "
                "it again"
            ) from error
        self.config = self._config()
        self.entries: dict[str, Entry] = {}
        for tensor in self._reader.tensors:
            name = _hub_name(tensor.name, self.where)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            self.entries[name] = Entry(
                shape,
                lambda tensor=tensor, name=name: self._read(tensor, name),
                tensor.tensor_type.name,
            )

    def _read(self, tensor: Any, name: str) -> Tensor:
        from gguf.quants import dequantize

        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("self_attn.q_proj.weight"):
            array = _hub_rows(array, self.config.num_attention_heads)
        elif name.endswith("self_attn.k_proj.weight"):
            array = _hub_rows(array, self.config.num_key_value_heads)
        return torch.from_numpy(np.ascontiguousarray(array))

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is None:
            raise CheckpointError(f"{self.where} lacks the field {name}; expected a Llama model")
        return default

    def _number(self, name: str, default: float | None = None) -> Any:
        value = self._field(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.where}: {name}={value!r}: expected a number")
        return value

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._number(name, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.where}: {name}={value!r}: expected a count, 1 or more")
        return value

    def _config(self) -> ModelConfig:
        kind = self._field("general.architecture")
        if kind != "llama":
            raise CheckpointError(
                f"{self.where} holds a {kind!r} model; expected 'llama' (others: convert the hub "
                "folder instead)"
            )
        if self._reader.get_field("llama.rope.scaling.type") is not None:
            raise CheckpointError(f"{self.where} has rope scaling, which is not supported in GGUF")
        names = {tensor.name for tensor in self._reader.tensors}
        if "rope_freqs.weight" in names:
            raise CheckpointError(
                f"{self.where} has rope_freqs (Llama 3 scaling), which is not supported"
            )
        embedding = next((t for t in self._reader.tensors if t.name == "token_embd.weight"), None)
        if embedding is None:
            raise CheckpointError(f"{self.where} lacks token_embd.weight; download it again")
        heads = self._count("llama.attention.head_count")
        hidden, layers = self._count("llama.embedding_length"), self._count("llama.block_count")
        ids = {
            f"{end}_token_id": self._number(f"tokenizer.ggml.{end}_token_id", -1)
            for end in ("bos", "eos")
        }
        pad = self._number("tokenizer.ggml.padding_token_id", -1)
        fields = {
            "vocab_size": int(embedding.shape[-1]),
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "first_k_dense_replace": layers,
            "intermediate_size": self._count("llama.feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("llama.attention.head_count_kv", heads),
            "head_dim": self._count("llama.rope.dimension_count", max(hidden // heads, 1)),
            "rms_norm_eps": self._number("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("llama.rope.freq_base", 10000.0),
            "max_position_embeddings": self._count("llama.context_length"),
            "tie_word_embeddings": "output.weight" not in names,
            **{name: value for name, value in ids.items() if value >= 0},
            "pad_token_id": pad if pad >= 0 else None,
        }
        return checked(fields, self.where)


def _hub_name(name: str, where: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] not in _PARTS:
        raise CheckpointError(f"{where}: tensor {name} is not part of a Llama model")
    return f"model.layers.{layer[1]}.{_PARTS[layer[2]]}.weight"


def _hub_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """[heads * D, H] from pairs (2 i, 2 i + 1) to pairs (i, i + D / 2)."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, array.shape[1])
    return pairs.swapaxes(1, 2).reshape(array.shape)
