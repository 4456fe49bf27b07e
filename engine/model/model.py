"""The K2.5 text policy, one definition for engine and learner.

The model computes token rows; who attends to what is the caller's business: the learner attends
inside padded sequences, the engine in its paged cache. Shapes: N rows, H hidden, A query heads,
G key-value heads, D head size, L MoE layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.model.attention import Attention, LatentAttention
from engine.model.config import ModelConfig
from engine.model.moe import DenseFFN, MoE
from engine.model.norm import RMSNorm
from engine.model.ops import FastOps, RowOps
from engine.model.rope import RotaryTable

__all__ = ["Attend", "Attention", "Layer", "PolicyModel", "RMSNorm", "WatchRouter"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, A, D], k [N, G, D], v [N, G, V]) -> [N, A, V]; q and k are rotated. Scores are
scaled by 1/sqrt(D)."""
WatchRouter = Callable[[int, Tensor, Tensor], None]
"""(MoE layer, scores fp32 [N, E] with gradient, own choice int64 [N, K])."""


class Layer(nn.Module):
    """Pre-norm block: attention, then experts or a dense FFN."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: Attention | LatentAttention = (
            LatentAttention(config) if config.is_mla else Attention(config)
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: MoE | DenseFFN = (
            MoE(config)
            if config.has_experts(index)
            else DenseFFN(config.hidden_size, config.intermediate_size)
        )


class PolicyModel(nn.Module):
    """Token rows in, final hidden rows out; ``logits`` applies the head where wanted."""

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        """``seed`` None leaves the tensors as torch allocates them, for a checkpoint to fill."""
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
        self.rotary = RotaryTable(config)
        if seed is not None:
            initialise(self, seed)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        ops: RowOps | None = None,
        experts: Tensor | None = None,
        absorbed: bool = False,
        watch_router: WatchRouter | None = None,
    ) -> tuple[Tensor, Tensor]:
        """token_ids, positions int64 [N] -> (normed hidden [N, H], own choices int64 [N, L, K]).

        ``experts`` int64 [N, L, K] replays recorded routing; L counts MoE layers only. ``absorbed``
        gives ``attend`` the latent of mla instead of expanded heads; gqa has one form. Layers may
        lie on different devices: rows move to where a layer is.
        """
        ops = ops or FastOps()
        x = self.embed_tokens[token_ids.to(self.embed_tokens.device)]
        rotate = self.rotary(positions.to(self.rotary.cos.device))
        choices: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            device = layer.input_layernorm.weight.device
            if x.device != device or rotate.cos.device != device:
                x, rotate = x.to(device), rotate.to(device)
            x = x + layer.self_attn(
                layer.input_layernorm(x),
                rotate,
                lambda q, k, v, index=index: attend(index, q, k, v),
                ops,
                absorbed,
            )
            h = layer.post_attention_layernorm(x)
            if isinstance(layer.mlp, MoE):
                replay = None if experts is None else experts[:, len(choices)].to(device)
                out, chosen, scores = layer.mlp.compute(h, ops, replay)
                if watch_router is not None:
                    watch_router(len(choices), scores, chosen)
                choices.append(chosen.to(token_ids.device))
            else:
                out = layer.mlp(h, ops)
            x = x + out
        if choices:
            stacked = torch.stack(choices, dim=1)
        else:
            shape = (len(token_ids), 0, self.config.num_experts_per_tok)
            stacked = torch.zeros(shape, dtype=torch.long, device=token_ids.device)
        return self.norm(x.to(self.norm.weight.device)), stacked

    def logits(self, hidden: Tensor, ops: RowOps | None = None) -> Tensor:
        """hidden [N, H] -> fp32 [N, V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return (ops or FastOps()).linear(hidden.to(head.device), head).float()


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
