"""What a model costs: parameters, work and cache a token, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.moe import MoE


@dataclass(frozen=True, slots=True)
class Account:
    """Counts of parameters, unless named otherwise."""

    total: int
    active: int
    """Read for one token: all but the routed experts that were not chosen; embedding included."""
    active_without_embedding: int
    expert: int
    """One routed expert; 0 without experts."""
    attention: int
    """One layer, its latent norms included."""
    cached_values: int
    """Numbers an engine must keep for a token in one layer."""
    cache_bytes: int
    """For a token in all layers, bf16."""
    matmul_flops: int
    """Forward work of one token outside attention scores: 2 for each active weight of a matrix."""
    score_flops: int
    """Forward work of one token for each earlier token it sees (plain form), all layers."""

    def flops(self, context: int) -> int:
        """Forward work of the token at position ``context``."""
        return self.matmul_flops + self.score_flops * context


def account(config: ModelConfig) -> Account:
    """Builds the model on the meta device: no memory, whatever its size."""
    with torch.device("meta"):
        model = PolicyModel(config, seed=None)
    total = sum(p.numel() for p in model.parameters())
    expert = idle = 0
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            one = layer.mlp.experts_gate_up_proj[0].numel() + layer.mlp.experts_down_proj[0].numel()
            expert = one
            idle += one * (config.n_routed_experts - config.num_experts_per_tok)
    embedding = model.embed_tokens.numel()
    active = total - idle
    # a tied embedding is read as the head
    without = active if config.tie_word_embeddings else active - embedding
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    attention = model.layers[0].self_attn
    assert isinstance(attention, torch.nn.Module), "every layer has attention"
    values = (
        config.cached_key_dim
        if config.is_mla
        else 2 * config.num_key_value_heads * (config.head_dim)
    )
    value_dim = config.v_head_dim if config.is_mla else config.head_dim
    per_pair = 2 * config.num_attention_heads * (config.qk_head_dim + value_dim)
    return Account(
        total=total,
        active=active,
        active_without_embedding=without,
        expert=expert,
        attention=sum(p.numel() for p in attention.parameters()),
        cached_values=values,
        cache_bytes=2 * values * config.num_hidden_layers,
        matmul_flops=2 * (without - vectors),
        score_flops=per_pair * config.num_hidden_layers,
    )
