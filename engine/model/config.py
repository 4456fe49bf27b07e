"""Shape of the K2.5 text model. Field names follow the released config.json (facts 1.1)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.attention.config import HybridConfig
from infra.config import ConfigModel


class AttentionConfig(ConfigModel):
    kind: Literal["gqa", "mla"] = "gqa"
    """Grouped-query (Llama family, the demo) or multi-head latent (K2, DeepSeek-V3)."""
    mode: Literal["full", "hybrid"] = "full"
    """What a query may see: every earlier token, or sink + window + retrieved tokens. Part of the
    policy: the learner repeats what the engine read."""
    hybrid: HybridConfig = HybridConfig()
    """Read in mode hybrid only."""
    hot: int = Field(default=2048, ge=0)
    """Hybrid: newest tokens that are read in full precision; older ones from their codes."""
    profile: Literal["k8v8", "k8v4", "literal", "full"] = "k8v8"
    """Hybrid: codes of older tokens, see engine.kvcache.quantise."""

    @model_validator(mode="after")
    def _window_is_hot(self) -> Self:
        if self.mode == "hybrid" and self.hybrid.window > self.hot:
            raise ValueError(
                f"attention.hybrid.window={self.hybrid.window} is longer than attention.hot="
                f"{self.hot}; the window is read in full precision: raise hot or lower the window"
            )
        return self


class YarnConfig(ConfigModel):
    """``rope_scaling`` of the released configs: beta_fast is 32 in K2.5 and 1 in earlier K2."""

    factor: float = Field(ge=1.0)
    original_max_position_embeddings: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    mscale: float = Field(default=1.0, ge=0)
    mscale_all_dim: float = Field(default=0.0, ge=0)


class ModelConfig(ConfigModel):
    """Defaults are the laptop-size policy of the demo, about 0.55 M parameters."""

    vocab_size: int = Field(default=320, ge=1)
    hidden_size: int = Field(default=96, ge=1)
    num_hidden_layers: int = Field(default=3, ge=1)
    first_k_dense_replace: int = Field(default=0, ge=0)
    """The first k layers have a dense FFN of ``intermediate_size`` instead of experts; all of them
    in a model of the Llama family."""
    moe_layer_freq: int = Field(default=1, ge=1)
    """After those, every layer whose index is a multiple of this has experts."""
    intermediate_size: int = Field(default=192, ge=1)
    moe_intermediate_size: int = Field(default=96, ge=1)
    n_routed_experts: int = Field(default=4, ge=1)
    num_experts_per_tok: int = Field(default=2, ge=1)
    n_shared_experts: int = Field(default=1, ge=0)
    n_group: int = Field(default=1, ge=1)
    """Groups of experts (DeepSeek-V3: 8); a token looks at ``topk_group`` of them."""
    topk_group: int = Field(default=1, ge=1)
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    seq_aux: bool = True
    """Balance loss per sequence (else per batch) where a trainer asks for one."""
    aux_loss_alpha: float = Field(default=0.0, ge=0)
    """Weight of that loss; 0.001 in the released config, where inference does not read it."""
    hidden_act: Literal["silu"] = "silu"
    attention: AttentionConfig = AttentionConfig()
    attention_bias: Literal[False] = False
    num_attention_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=24, ge=2, multiple_of=2)
    """Size of a gqa head; mla has the five sizes below."""
    q_lora_rank: int | None = Field(default=None, ge=1)
    """None: queries are projected at once."""
    kv_lora_rank: int = Field(default=512, ge=1)
    qk_nope_head_dim: int = Field(default=128, ge=1)
    qk_rope_head_dim: int = Field(default=64, ge=2, multiple_of=2)
    v_head_dim: int = Field(default=128, ge=1)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    latent_norm_eps: float = Field(default=1e-6, gt=0)
    """Of the two norms inside mla: the released code and transformers give them no eps of their
    own, so they keep the class default whatever rms_norm_eps is."""
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: YarnConfig | None = None
    rope_interleave: bool = False
    """Rotate pairs (x0, x1), (x2, x3) ... (K2, DeepSeek-V3) instead of (x0, xD/2), ... (Llama)."""
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = Field(default=0, ge=0)
    """Extra layers for multi-token prediction in the checkpoint: known, skipped when loading."""
    max_position_embeddings: int = Field(default=2048, ge=1)
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

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
        if self.is_mla and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"attention.kind='mla' has one key for each query head, but num_key_value_heads="
                f"{self.num_key_value_heads} and num_attention_heads={self.num_attention_heads}"
            )
        return self

    @model_validator(mode="after")
    def _index_fits(self) -> Self:
        hybrid = self.attention.hybrid
        if self.attention.mode != "hybrid" or hybrid.index != "latent":
            return self
        if not self.is_mla or hybrid.latent_dims > self.kv_lora_rank:
            raise ValueError(
                f"attention.hybrid.index='latent' with latent_dims={hybrid.latent_dims}: expected "
                f"attention.kind='mla' (it is {self.attention.kind!r}) and at most kv_lora_rank="
                f"{self.kv_lora_rank} of them"
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        if self.n_group == 1:
            return self
        size = self.n_routed_experts // self.n_group
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group or size < 2:
            raise ValueError(
                f"n_group={self.n_group}, topk_group={self.topk_group}: expected groups of at "
                f"least 2 that divide n_routed_experts={self.n_routed_experts}, and no more chosen"
            )
        if self.num_experts_per_tok > self.topk_group * size:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds the "
                f"{self.topk_group * size} experts of topk_group={self.topk_group} groups"
            )
        return self

    @property
    def is_mla(self) -> bool:
        return self.attention.kind == "mla"

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def num_moe_layers(self) -> int:
        return sum(map(self.has_experts, range(self.num_hidden_layers)))

    @property
    def qk_head_dim(self) -> int:
        """Size of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.is_mla else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return self.qk_rope_head_dim if self.is_mla else self.head_dim

    @property
    def cached_heads(self) -> int:
        """Heads that an engine stores for a token and layer; the latent of mla counts as one."""
        return 1 if self.is_mla else self.num_key_value_heads

    @property
    def cached_key_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim if self.is_mla else self.head_dim

    @property
    def cached_value_dim(self) -> int:
        """Under mla the values are the first part of the keys."""
        return self.kv_lora_rank if self.is_mla else self.head_dim
