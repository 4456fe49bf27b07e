"""Shapes of the released models (facts 1.1), for accounts and for tests at full size on meta."""

from __future__ import annotations

from engine.model.config import AttentionConfig, ModelConfig, YarnConfig


def kimi_k25() -> ModelConfig:
    """The text part of K2.5 and K2.6."""
    return ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=61,
        first_k_dense_replace=1,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=384,
        num_experts_per_tok=8,
        n_shared_experts=1,
        routed_scaling_factor=2.827,
        aux_loss_alpha=0.001,
        attention=AttentionConfig(kind="mla"),
        num_attention_heads=64,
        num_key_value_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        rope_scaling=YarnConfig(
            factor=64.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        rope_interleave=True,
        max_position_embeddings=262144,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )


def _k2(factor: float, max_positions: int) -> ModelConfig:
    k25 = kimi_k25()
    assert k25.rope_scaling is not None, "set above"
    yarn = k25.rope_scaling.model_copy(update={"factor": factor, "beta_fast": 1.0})
    return k25.model_copy(update={"rope_scaling": yarn, "max_position_embeddings": max_positions})


def kimi_k2_0905() -> ModelConfig:
    return _k2(64.0, 262144)


def kimi_k2_0711() -> ModelConfig:
    return _k2(32.0, 131072)


PRESETS = {
    "kimi-k2.5": kimi_k25,
    "kimi-k2-0905": kimi_k2_0905,
    "kimi-k2-0711": kimi_k2_0711,
    "demo": ModelConfig,
}
