"""Shape of the K2.5 text model. Field names follow the released config.json (facts 1.1)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from infra.config import ConfigModel


class ModelConfig(ConfigModel):
    """Defaults are the laptop-size policy of the demo, about 0.55 M parameters."""

    vocab_size: int = Field(default=320, ge=1)
    hidden_size: int = Field(default=96, ge=1)
    num_hidden_layers: int = Field(default=3, ge=1)
    first_k_dense_replace: int = Field(default=0, ge=0)
    """The first k layers have a dense FFN of ``intermediate_size`` instead of experts."""
    intermediate_size: int = Field(default=192, ge=1)
    moe_intermediate_size: int = Field(default=96, ge=1)
    n_routed_experts: int = Field(default=4, ge=1)
    num_experts_per_tok: int = Field(default=2, ge=1)
    n_shared_experts: int = Field(default=1, ge=0)
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    num_attention_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=24, ge=2, multiple_of=2)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = Field(default=2048, ge=1)
    initializer_range: float = 0.02

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
                f"n_routed_experts={self.n_routed_experts}"
            )
        return self

    @property
    def num_moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)
