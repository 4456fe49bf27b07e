"""Where QK-Clip holds scores back: in the weights, in the forward, in both, nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from engine.attention.batched import attend_batch
from engine.attention.score_cap import ScoreCap
from engine.attention.sequence import attend_sequence
from engine.model.attention import Attention, LatentAttention
from engine.model.config import ModelConfig
from engine.model.model import Layer, PolicyModel
from engine.model.sequences import forward_sequences
from parl.learner.config import LearnerConfig, OptimConfig
from parl.learner.learner import TokenLearner
from parl.learner.optim.qk_clip import QKClip
from tests.parl.learner.test_hybrid import HYBRID
from tests.parl.learner.tiny import MODEL, make_advantages, make_model, make_samples

MLA = ModelConfig.model_validate(
    {
        "vocab_size": MODEL.vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "attention": {"kind": "mla"},
        "head_dim": 12,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
)
GQA = ModelConfig.model_validate(
    MODEL.model_dump() | {"num_attention_heads": 4, "num_key_value_heads": 2}
)
IDS = torch.randint(0, MODEL.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([24, 15])


def attention_of(model: PolicyModel, layer: int = 0) -> Attention | LatentAttention:
    found = model.layers[layer]
    assert isinstance(found, Layer)
    return found.self_attn


def sharpen(model: PolicyModel, factor: float) -> PolicyModel:
    """Large queries in head 1 of layer 0."""
    with torch.no_grad():
        attention = attention_of(model)
        matrix = attention.q_proj if isinstance(attention, Attention) else attention.q_b_proj
        matrix.view(attention.heads, -1, matrix.shape[1])[1] *= factor
    return model


def highest(model: PolicyModel) -> Tensor:
    clip = QKClip(model, 1e9)
    with torch.no_grad():
        forward_sequences(model, IDS, LENGTHS, watch=clip.watch)
    return clip.max_scores


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("config", [GQA, MLA], ids=["gqa", "mla"])
def test_only_clipped_heads_move_and_score_tau(config: ModelConfig, alpha: float):
    """However the factor is split. Shared keys never move: those of a group, and mla's k_rope."""
    model = PolicyModel(config, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = highest(model)
    tau = float(scores[0].sort().values[1:3].mean())
    over = scores[0] > tau
    assert int(over.sum()) == 2
    # layers above see other inputs after the clip: they are left out of it
    QKClip(model, tau, alpha=alpha).step(torch.cat([scores[:1], torch.zeros_like(scores[1:])]))
    torch.testing.assert_close(highest(model)[0], scores[0].clamp(max=tau), rtol=1e-5, atol=1e-6)
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    prefix = "layers.0.self_attn."
    if config is GQA:
        assert changed == {prefix + "q_proj"}
        return
    keys = {prefix + "kv_b_proj"} if alpha < 1 else set()
    assert changed == {prefix + "q_b_proj"} | keys
    for name in changed:
        heads = (model.state_dict()[name] != before[name]).view(4, -1).any(dim=1)
        assert torch.equal(heads, over)
    nope = slice(0, config.qk_nope_head_dim)
    rows = "kv_b_proj"
    gamma = tau / scores[0, over]
    keys_before = before[prefix + rows].view(4, -1, config.kv_lora_rank)[over, nope]
    keys_after = model.state_dict()[prefix + rows].view(4, -1, config.kv_lora_rank)[over, nope]
    torch.testing.assert_close(keys_after, keys_before * gamma[:, None, None] ** (1 - alpha))


def test_profiles_choose_the_mode():
    """kimi clips weights, seed does both; what is written down wins."""
    assert OptimConfig().qk_mode == "weights"
    assert OptimConfig(profile="seed").qk_mode == "both"
    assert OptimConfig(profile="seed", qk_clip_mode="off").qk_mode == "off"


@pytest.mark.parametrize("config", [GQA, MLA, HYBRID], ids=["gqa", "mla", "hybrid"])
def test_an_idle_clamp_changes_no_bit(config: ModelConfig):
    """Only counts: every pair of a query and a key it reads, in each head of each layer."""
    model = PolicyModel(config, 3)
    cap = ScoreCap(float(highest(model).max()) * 1.01)
    with torch.no_grad():
        plain, _, _ = forward_sequences(model, IDS, LENGTHS)
        capped, _, _ = forward_sequences(model, IDS, LENGTHS, cap=cap)
    assert torch.equal(plain, capped) and cap.clamped == 0
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS.tolist())
    # 24 tokens lie within hybrid attention's sink and window
    assert cap.scores == pairs * config.num_attention_heads * config.num_hidden_layers


def test_a_clamped_score_is_the_limit_and_has_no_gradient():
    """Only where a query reads the key."""
    q = torch.ones(1, 1, 3, 4, requires_grad=True)
    logits = q @ torch.ones(1, 1, 4, 3)
    cap = ScoreCap(2.0)
    held = cap.clamp(logits, torch.ones(3, 3).tril().bool())
    assert held[0, 0].tolist() == [[2, 4, 4], [2, 2, 4], [2, 2, 2]]
    assert (cap.clamped, cap.scores) == (6, 6)
    held.tril().sum().backward()
    assert q.grad is not None and not q.grad.any()


def test_full_and_wide_hybrid_attention_clamp_alike():
    """Two ways to the same numbers, gradients and counts; the limit is felt."""
    wide = GQA.model_dump() | {"max_position_embeddings": 256}
    sparse = {"window": 256, "dense_below": 0}
    wide["attention"] = {"mode": "hybrid", "hot": 256, "hybrid": sparse}
    found = []
    for config in (GQA, ModelConfig.model_validate(wide)):
        model, cap = sharpen(PolicyModel(config, 3), 40.0), ScoreCap(1.5)
        hidden, _, _ = forward_sequences(model, IDS, LENGTHS, cap=cap)
        hidden[:, 3].sum().backward()
        found.append((hidden, attention_of(model).o_proj.grad, cap.clamped, cap.scores))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)
    assert found[0][2:] == found[1][2:] and found[0][2] > 50
    model = sharpen(PolicyModel(GQA, 3), 40.0)
    with torch.no_grad():
        free, _, _ = forward_sequences(model, IDS, LENGTHS)
    assert float((free - found[0][0].detach()).abs().max()) > 1e-3


def test_batched_and_single_sequences_clamp_alike():
    """Sparse queries too: chosen and coded tokens, in one product and one sequence at a time."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 110, n, 8, generator=generator) * 2 for n in (4, 2, 2))
    config = HYBRID.attention.hybrid
    caps = ScoreCap(1.0), ScoreCap(1.0)
    both = attend_batch(q, k, v, torch.tensor([110]), config, 40, cap=caps[0])
    one = attend_sequence(q[0], k[0], v[0], config, 40, cap=caps[1])
    torch.testing.assert_close(both.out[0], one.out, rtol=0, atol=1e-5)
    assert caps[0] == caps[1] and caps[0].clamped > 100


def make(factor: float, **optim: Any) -> TokenLearner:
    config = LearnerConfig.model_validate({"optim": optim})
    return TokenLearner(sharpen(make_model(), factor), config)


def test_weights_make_the_clamp_idle_after_warm_up():
    """Large queries: clamped at first, and no more after a few updates when the weights come down;
    with the clamp alone the scores behind it stay. Published weights carry a warning until then."""
    samples, gains = make_samples(make_model()), make_advantages(12)
    # the clip comes after the step and measures before it: a step of full size may pass tau again
    rates = {"muon_lr": 1e-4, "adamw_lr": 1e-5, "decay_updates": 2, "final_share": 0.01}
    optim = {"qk_clip": 2.0, **rates}
    both = make(30.0, qk_clip_mode="both", **optim)
    alone = make(30.0, qk_clip_mode="logits", **optim)
    found, kept = [], []
    with structlog.testing.capture_logs() as said:
        for _ in range(5):
            found.append(both.update(samples, gains)["logit_clamp_fraction"])
            both.weights()
            kept.append(alone.update(samples, gains))
    assert found[0] > 0.01 and found[-1] == 0
    assert kept[0]["logit_clamp_fraction"] == found[0]
    assert all(metrics["logit_clamp_fraction"] > 0.01 for metrics in kept)
    assert kept[-1]["max_attention_score"] > 4
    warned = [entry["logit_clamp_fraction"] for entry in said if entry["log_level"] == "warning"]
    assert warned == [fraction for fraction in found if fraction > 0]


def test_off_and_weights_have_no_clamp():
    """No metric of it; off leaves large scores alone but still tells them."""
    samples, gains = make_samples(make_model()), make_advantages(12)
    still = {"qk_clip": 2.0, "muon_lr": 0.0, "adamw_lr": 0.0}
    off = make(30.0, qk_clip_mode="off", **still)
    scores = [off.update(samples, gains)["max_attention_score"] for _ in range(2)]
    assert scores[0] == scores[1] > 4
    weights = make(30.0, **still)
    metrics = weights.update(samples, gains)
    assert metrics["max_attention_score"] == scores[0] and "logit_clamp_fraction" not in metrics
    assert weights.update(samples, gains)["max_attention_score"] < scores[0]
