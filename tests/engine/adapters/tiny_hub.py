"""Tiny models in layouts that other engines know, as hub folders and weight sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from engine.model.checkpoint.save import save_model
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.runtime.types import WeightSet
from engine.runtime.weights import make_weight_set

LLAMA = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
"""Dense, with a head that is the embedding: trap B."""
TEXT = LLAMA.model_copy(
    update={"vocab_size": 320, "first_k_dense_replace": 1, "moe_intermediate_size": 64}
)
"""With experts, over bytes and room beyond them, as vocabularies have."""
DEEPSEEK = ModelConfig.model_validate(
    LLAMA.model_dump()
    | {
        "attention": {"kind": "mla"},
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 192,
        "rope_interleave": True,
    }
)
"""Experts and latent attention with plain RoPE: traps A and C. Ranks are those vLLM's CPU takes."""


def make_policy(config: ModelConfig, seed: int) -> PolicyModel:
    """Random everywhere, and far enough from uniform that a stale tensor shows."""
    model = PolicyModel(config, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                continue
            scale = 0.5 if name == "embed_tokens" else 0.1
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return model


def make_set(config: ModelConfig, version: int) -> WeightSet:
    """Other tensors for every version; version 0 is what ``save_tiny`` writes."""
    tensors = {
        name: tensor.numpy().copy()
        for name, tensor in make_policy(config, version).state_dict().items()
    }
    return make_weight_set(version, tensors, config.model_dump(mode="json"))


def save_tiny(config: ModelConfig, folder: Path, tokenizer: bool = False) -> Path:
    save_model(make_policy(config, 0), folder)
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


def byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of the 256 bytes, the end and the start of a turn."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
    added = [
        {"id": 256 + place, "content": content, "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for place, content in enumerate(("<|im_end|>", "<|im_start|>"))
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": True}  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "post_processor": None, "added_tokens": added, "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }  # fmt: skip
