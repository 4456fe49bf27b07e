"""Attention projections. Who attends to what is the caller's: it passes ``attend``.

Shapes: N rows, H hidden, A query heads, G key-value heads, D query and key size, V value size,
R latent rank. ``attend(q [N, A, D], k [N, G, D], v [N, G, V]) -> [N, A, V]`` scales scores by
1/sqrt(D) of what it is given; a model with another scale puts the quotient into its queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.norm import RMSNorm
from engine.model.ops import RowOps
from engine.model.rope import Rotation, softmax_scale

AttendRows = Callable[[Tensor, Tensor, Tensor], Tensor]


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
        self, x: Tensor, rotate: Rotation, attend: AttendRows, ops: RowOps, absorbed: bool
    ) -> Tensor:
        """``absorbed`` changes nothing here."""
        n = x.shape[0]
        q = ops.linear(x, self.q_proj).view(n, self.heads, self.head_dim)
        k = ops.linear(x, self.k_proj).view(n, self.groups, self.head_dim)
        v = ops.linear(x, self.v_proj).view(n, self.groups, self.head_dim)
        out = attend(rotate(q), rotate(k), v)
        return ops.linear(out.reshape(n, -1), self.o_proj)

    def scale_scores(self, factor: Tensor, alpha: float = 0.5) -> None:
        """Multiply each head's scores by factor [A]; the keys of a group are shared, so all of it
        goes to the queries, whatever ``alpha``."""
        self.q_proj.view(self.heads, self.head_dim, -1).mul_(factor[:, None, None])


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 2.1; facts 1.2).

    Plain: every head expands the latent to its key and value; for training and long prompts.
    Absorbed: kv_b_proj moves into query and output, all heads share [latent | k_rope] as the key
    and the latent as the value (G = 1); what an engine caches is then R + D_rope numbers a token.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.rank = heads, config.kv_lora_rank
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value = config.v_head_dim
        self.scale = softmax_scale(config)
        width = heads * config.qk_head_dim
        self.q_a_proj: nn.Parameter | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if config.q_lora_rank is None:
            self.q_proj = nn.Parameter(torch.empty(width, hidden))
        else:
            self.q_a_proj = nn.Parameter(torch.empty(config.q_lora_rank, hidden))
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
            self.q_b_proj = nn.Parameter(torch.empty(width, config.q_lora_rank))
        self.kv_a_proj_with_mqa = nn.Parameter(torch.empty(self.rank + self.rope, hidden))
        self.kv_a_layernorm = RMSNorm(self.rank, config.latent_norm_eps)
        self.kv_b_proj = nn.Parameter(torch.empty(heads * (self.nope + self.value), self.rank))
        self.o_proj = nn.Parameter(torch.empty(hidden, heads * self.value))

    def forward(
        self, x: Tensor, rotate: Rotation, attend: AttendRows, ops: RowOps, absorbed: bool
    ) -> Tensor:
        n = x.shape[0]
        q_nope, q_rope = self._queries(x, ops).split([self.nope, self.rope], dim=-1)
        q_rope = rotate(q_rope)
        latent, k_rope = ops.linear(x, self.kv_a_proj_with_mqa).split([self.rank, self.rope], -1)
        latent = self.kv_a_layernorm(latent.contiguous())
        k_rope = rotate(k_rope[:, None])
        if absorbed:
            out = self._absorbed(q_nope, q_rope, latent, k_rope, attend, ops)
        else:
            kv = ops.linear(latent, self.kv_b_proj).view(n, self.heads, self.nope + self.value)
            k_nope, v = kv.split([self.nope, self.value], dim=-1)
            k = torch.cat([k_nope, k_rope.expand(-1, self.heads, -1)], dim=-1)
            out = attend(self._scaled(q_nope, q_rope), k, v)
        return ops.linear(out.reshape(n, -1), self.o_proj)

    def scale_scores(self, factor: Tensor, alpha: float = 0.5) -> None:
        """Multiply each head's scores by factor [A]: factor^alpha to the query and
        factor^(1 - alpha) to the key where a head owns both, all to the query where k_rope is
        shared (facts 2.1)."""
        matrix = self.q_proj if self.q_a_proj is None else self.q_b_proj
        queries = matrix.view(self.heads, self.nope + self.rope, -1)
        keys = self.kv_b_proj.view(self.heads, self.nope + self.value, -1)
        factor = factor[:, None, None]
        queries[:, : self.nope].mul_(factor**alpha)
        keys[:, : self.nope].mul_(factor ** (1 - alpha))
        queries[:, self.nope :].mul_(factor)

    def _queries(self, x: Tensor, ops: RowOps) -> Tensor:
        """[N, A, nope + rope]"""
        if self.q_a_proj is None or self.q_a_layernorm is None:
            q = ops.linear(x, self.q_proj)
        else:
            q = ops.linear(self.q_a_layernorm(ops.linear(x, self.q_a_proj)), self.q_b_proj)
        return q.view(len(x), self.heads, self.nope + self.rope)

    def _absorbed(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        attend: AttendRows,
        ops: RowOps,
    ) -> Tensor:
        expand = self.kv_b_proj.view(self.heads, self.nope + self.value, self.rank)
        to_key, to_value = expand.split([self.nope, self.value], dim=1)
        q = self._scaled(ops.heads(q_nope, to_key.transpose(1, 2)), q_rope)
        shared = latent[:, None]
        out = attend(q, torch.cat([shared, k_rope], dim=-1), shared)
        return ops.heads(out, to_value)

    def _scaled(self, nope: Tensor, rope: Tensor) -> Tensor:
        q = torch.cat([nope, rope], dim=-1)
        return q * (self.scale * q.shape[-1] ** 0.5)
