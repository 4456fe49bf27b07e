"""The policy: init from a seed, routing, replay, and independent references for its parts."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from engine.model.config import ModelConfig
from engine.model.model import PolicyModel, count_parameters
from engine.model.moe import MoE
from engine.model.ops import FastOps, TiledOps
from engine.model.sequences import forward_sequences
from tests.engine.tiny import MODEL, make_model


def test_init_depends_on_the_seed_alone():
    """Not on torch's global generator or on what was built before."""
    torch.manual_seed(1)
    first = PolicyModel(MODEL, 7).state_dict()
    torch.manual_seed(2)
    PolicyModel(MODEL, 8)
    second, other = PolicyModel(MODEL, 7).state_dict(), PolicyModel(MODEL, 8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed_tokens"], other["embed_tokens"])


def test_the_first_policy_is_uniform():
    """A zero head: no token is preferred before training."""
    model = PolicyModel(MODEL, 0)
    ids = torch.arange(6)[None]
    hidden, _, _ = forward_sequences(model, ids, torch.tensor([6]))
    assert not model.logits(hidden).any() and hidden.abs().sum() > 0


def test_demo_size():
    """About half a million parameters."""
    assert 450_000 < count_parameters(PolicyModel(ModelConfig())) < 650_000


def test_k2_shape_at_toy_width():
    """384 experts top-8, one dense layer, as many key-value as query heads."""
    config = ModelConfig(
        hidden_size=16,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=32,
        moe_intermediate_size=8,
        n_routed_experts=384,
        num_experts_per_tok=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        routed_scaling_factor=2.827,
        rope_theta=50000.0,
    )
    model = make_model(config)
    hidden, chosen, _ = forward_sequences(model, torch.arange(40)[None], torch.tensor([40]))
    assert chosen.shape == (40, 2, 8) and chosen.max() < 384
    assert all(len(set(row)) == 8 for row in chosen[:, 0].tolist())
    model.logits(hidden).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("ops", [FastOps(), TiledOps()], ids=["fast", "tiled"])
def test_experts_equal_deepseek_v3(ops: FastOps | TiledOps):
    """Router with selection bias, weights, scaling and shared expert: transformers' module."""
    reference = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=MODEL.hidden_size,
            moe_intermediate_size=MODEL.moe_intermediate_size,
            n_routed_experts=MODEL.n_routed_experts,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=MODEL.routed_scaling_factor,
        )
    ).eval()
    layer = make_model().layers[1].mlp
    assert isinstance(layer, MoE) and layer.shared_experts is not None
    shared = layer.shared_experts
    with torch.no_grad():
        reference.gate.weight.copy_(layer.gate.weight)
        reference.gate.e_score_correction_bias.copy_(layer.gate.e_score_correction_bias)
        reference.experts.gate_up_proj.copy_(layer.experts_gate_up_proj)
        reference.experts.down_proj.copy_(layer.experts_down_proj)
        gate, up = shared.gate_up_proj.chunk(2)
        reference.shared_experts.gate_proj.weight.copy_(gate)
        reference.shared_experts.up_proj.weight.copy_(up)
        reference.shared_experts.down_proj.weight.copy_(shared.down_proj)
        x = torch.randn(64, MODEL.hidden_size, generator=torch.Generator().manual_seed(3))
        out, chosen = layer(x, ops)
        torch.testing.assert_close(out, reference(x[None])[0], rtol=1e-5, atol=1e-6)
    assert len(set(chosen.flatten().tolist())) > 2


def test_dense_layers_equal_llama():
    """RMSNorm, RoPE, grouped-query attention, SwiGLU, head: transformers' Llama."""
    config = MODEL.model_copy(update={"first_k_dense_replace": 3})
    model = make_model(config)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            attn_implementation="eager",
        )
    ).eval()
    mine = model.state_dict()
    with torch.no_grad():
        reference.model.embed_tokens.weight.copy_(mine["embed_tokens"])
        reference.lm_head.weight.copy_(mine["lm_head"])
        for index, layer in enumerate(reference.model.layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = mine[f"layers.{index}.self_attn.{name}"]
                layer.self_attn.get_submodule(name).weight.copy_(weight)
            gate, up = mine[f"layers.{index}.mlp.gate_up_proj"].chunk(2)
            layer.mlp.gate_proj.weight.copy_(gate)
            layer.mlp.up_proj.weight.copy_(up)
            layer.mlp.down_proj.weight.copy_(mine[f"layers.{index}.mlp.down_proj"])
        ids = torch.randint(0, 83, (2, 50), generator=torch.Generator().manual_seed(3))
        hidden, _, _ = forward_sequences(model, ids, torch.tensor([50, 50]))
        expected = reference(ids).logits.flatten(0, 1)
        torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-4, atol=1e-5)


def test_bias_selects_and_never_weighs():
    """A bias that changes the choice changes no weight of a choice that is replayed."""
    layer = make_model().layers[1].mlp
    assert isinstance(layer, MoE)
    x = torch.randn(40, MODEL.hidden_size, generator=torch.Generator().manual_seed(3))
    before, chosen = layer(x, FastOps())
    layer.gate.e_score_correction_bias[0] += 10.0
    after, biased = layer(x, FastOps())
    replayed, own = layer(x, FastOps(), chosen)
    assert (biased == 0).any(dim=1).all() and not torch.equal(before, after)
    assert torch.equal(replayed, before) and torch.equal(own, biased)


def test_padding_is_not_computed():
    """A short sequence beside a long one = the short one alone; rows name the real tokens."""
    model = make_model()
    ids = torch.randint(0, 83, (2, 30), generator=torch.Generator().manual_seed(3))
    together, _, rows = forward_sequences(model, ids, torch.tensor([30, 9]))
    alone, _, _ = forward_sequences(model, ids[1:, :9], torch.tensor([9]))
    assert rows.tolist() == [*range(30), *range(30, 39)]
    torch.testing.assert_close(together[30:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "not a multiple"),
        ({"num_experts_per_tok": 9}, "exceeds n_routed_experts"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, int], words: str):
    """With the names and values that disagree."""
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate(changes)
