"""A tiny policy with a head that is not uniform, and engines that serve it."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.runtime.types import WeightSet
from engine.runtime.weights import make_weight_set

MODEL = ModelConfig(
    vocab_size=83,
    hidden_size=48,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=80,
    moe_intermediate_size=32,
    n_routed_experts=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    routed_scaling_factor=1.3,
    max_position_embeddings=256,
)
MLA = ModelConfig.model_validate(
    MODEL.model_dump()
    | {
        "attention": {"kind": "mla"},
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rope_interleave": True,
        "head_dim": 24,
    }
)
"""The same with latent attention."""
HYBRID = ModelConfig.model_validate(
    MODEL.model_dump()
    | {
        "head_dim": 16,
        "attention": {
            "mode": "hybrid",
            "hot": 32,
            "hybrid": {"window": 16, "topk": 8, "candidates": 24, "dense_below": 0},
        },
    }
)
"""Hybrid attention; block 1 turns warm at 96 tokens."""
ENGINE = EngineConfig(max_context=160, num_blocks=512, block_size=32, max_contexts=128, max_rows=96)


def make_model(config: ModelConfig = MODEL, seed: int = 0) -> PolicyModel:
    """Random everywhere, selection bias and head included."""
    model = PolicyModel(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head" or name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


def make_weights(version: int = 1, config: ModelConfig = MODEL, seed: int = 0) -> WeightSet:
    tensors = {name: t.numpy() for name, t in make_model(config, seed).state_dict().items()}
    return make_weight_set(version, tensors, config.model_dump(mode="json"))


def make_engine(config: EngineConfig = ENGINE, model: ModelConfig = MODEL) -> LightEngine:
    weights = make_weights(config=model)
    return LightEngine(model, config, fetch_weights=lambda version: weights)
