"""The released model at full size on the meta device, against published and measured figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.model.account import account
from engine.model.checkpoint.hub_config import from_hub, read_config, to_hub
from engine.model.config import ModelConfig
from engine.model.presets import PRESETS, kimi_k25
from engine.model.rope import inverse_frequencies, softmax_scale

RELEASED = Path(os.environ.get("PARL_KIMI_DIR", ""))


def test_kimi_k25_costs():
    """facts 1.1: 1.0264T parameters (reports: 1.04T), 32.86B active (reports: 32.6B), 70,272 bytes
    of cache a token."""
    costs = account(kimi_k25())
    assert costs.total == pytest.approx(1.0264e12, rel=1e-4)
    assert costs.total == pytest.approx(1.04e12, rel=0.015)
    assert costs.active == pytest.approx(32.86e9, rel=2e-4)
    assert costs.active == pytest.approx(32.6e9, rel=0.01)
    assert costs.active_without_embedding == pytest.approx(31.69e9, rel=2e-4)
    assert costs.expert == pytest.approx(44.04e6, rel=1e-4)
    assert costs.attention == pytest.approx(101.1e6, rel=1e-3)
    assert costs.cached_values == 576 and costs.cache_bytes == 70_272
    # two for each active weight, and 64 heads of 192 + 128 over 61 layers for each earlier token
    assert costs.matmul_flops == pytest.approx(2 * 31.69e9, rel=1e-3)
    assert costs.flops(1000) - costs.flops(999) == 2 * 64 * (192 + 128) * 61


def test_yarn_constants():
    """facts 1.2: softmax scale 0.144680, 0.072169 without m^2; K2-0905's ramp is one step wide."""
    config = kimi_k25()
    assert softmax_scale(config) == pytest.approx(0.144680, abs=1e-6)
    plain = config.model_copy(update={"rope_scaling": None})
    assert softmax_scale(plain) == pytest.approx(0.072169, abs=1e-6)
    quotient = inverse_frequencies(plain) / inverse_frequencies(config)
    assert quotient[0] == 1.0 and quotient[-1] == 64.0
    assert int(((quotient > 1) & (quotient < 64)).sum()) > 5
    early = inverse_frequencies(plain) / inverse_frequencies(PRESETS["kimi-k2-0905"]())
    assert int(((early > 1.001) & (early < 63.999)).sum()) <= 1


@pytest.mark.skipif(
    "PARL_KIMI_DIR" not in os.environ, reason="PARL_KIMI_DIR: no folder with the released config"
)
def test_preset_is_the_released_config():
    """Field by field, from the nested config of K2.5."""
    assert from_hub(read_config(RELEASED)) == kimi_k25()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_their_config_json(name: str):
    """What we write is read as the same model."""
    config = PRESETS[name]()
    assert from_hub(to_hub(config)) == config


def test_dense_account():
    """A tied Llama: everything is active, the embedding is read as the head."""
    config = ModelConfig(first_k_dense_replace=3, tie_word_embeddings=True)
    costs = account(config)
    assert costs.total == costs.active == costs.active_without_embedding and costs.expert == 0
    assert costs.cache_bytes == 2 * 2 * 2 * 24 * 3
