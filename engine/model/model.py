"""The K2.5 text policy, one definition for engine and learner.

The model computes token rows; who attends to what is the caller's business: the learner attends
inside padded sequences, the engine in its paged cache. Shapes: N rows, H hidden, A query heads,
G key-value heads, D head size, L MoE layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.moe import DenseFFN, MoE
from engine.model.ops import FastOps, RowOps
from engine.model.rope import RotaryTable

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, A, D], k [N, G, D], v [N, G, D]) -> [N, A, D]; q and k are rotated."""


class RMSNorm(nn.Module):
    """fp32 root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        self.q_proj = nn.Parameter(torch.empty(self.heads * self.head_dim, hidden))
        self.k_proj = nn.Parameter(torch.empty(self.groups * self.head_dim, hidden))
        self.v_proj = nn.Parameter(torch.empty(self.groups * self.head_dim, hidden))
        self.o_proj = nn.Parameter(torch.empty(hidden, self.heads * self.head_dim))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotary: RotaryTable,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        ops: RowOps,
    ) -> Tensor:
        n = x.shape[0]
        q = ops.linear(x, self.q_proj).view(n, self.heads, self.head_dim)
        k = ops.linear(x, self.k_proj).view(n, self.groups, self.head_dim)
        v = ops.linear(x, self.v_proj).view(n, self.groups, self.head_dim)
        out = attend(rotary(q, positions), rotary(k, positions), v)
        return ops.linear(out.reshape(n, -1), self.o_proj)


class Layer(nn.Module):
    """Pre-norm block: attention, then experts or a dense FFN."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: MoE | DenseFFN = (
            DenseFFN(config.hidden_size, config.intermediate_size)
            if index < config.first_k_dense_replace
            else MoE(config)
        )


class PolicyModel(nn.Module):
    """Token rows in, final hidden rows out; ``logits`` applies the head where wanted."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        )
        self.rotary = RotaryTable(
            config.head_dim, config.rope_theta, config.max_position_embeddings
        )
        initialise(self, seed)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        ops: RowOps | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """token_ids, positions int64 [N] -> (normed hidden [N, H], own choices int64 [N, L, K]).

        ``experts`` int64 [N, L, K] replays recorded routing; L counts MoE layers only.
        """
        ops = ops or FastOps()
        x = self.embed_tokens[token_ids]
        choices: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x = x + layer.self_attn(
                layer.input_layernorm(x),
                positions,
                self.rotary,
                lambda q, k, v, index=index: attend(index, q, k, v),
                ops,
            )
            h = layer.post_attention_layernorm(x)
            if isinstance(layer.mlp, MoE):
                replay = None if experts is None else experts[:, len(choices)]
                out, chosen = layer.mlp(h, ops, replay)
                choices.append(chosen)
            else:
                out = layer.mlp(h, ops)
            x = x + out
        stacked = (
            torch.stack(choices, dim=1)
            if choices
            else torch.zeros(len(token_ids), 0, self.config.num_experts_per_tok, dtype=torch.long)
        )
        return self.norm(x), stacked

    def logits(self, hidden: Tensor, ops: RowOps | None = None) -> Tensor:
        """hidden [N, H] -> fp32 [N, V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return (ops or FastOps()).linear(hidden, head).float()


def initialise(model: PolicyModel, seed: int) -> None:
    """Normal(0, 1/fan_in) matrices, Normal(0, initializer_range) embedding, zero head.

    Each tensor has a generator of its own, seeded by (seed, rank of its name among all names): the
    values depend on nothing else. A zero head makes the first policy uniform.
    """
    with torch.no_grad():
        for position, (name, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name == "lm_head":
                parameter.zero_()
            else:
                std = parameter.shape[-1] ** -0.5
                if name in ("embed_tokens",) or name.endswith("gate.weight"):
                    std = model.config.initializer_range * (5 if name == "embed_tokens" else 1)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
