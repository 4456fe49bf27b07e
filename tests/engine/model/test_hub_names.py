"""Hub names: the released spelling, and a lossless way back."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.model.hub_names import from_hub, to_hub
from tests.engine.tiny import MODEL, make_weights


def test_names_are_those_of_the_released_checkpoints():
    """Dense layer 0, expert layers after it, norms, router, embedding and head."""
    hub = to_hub(make_weights().tensors)
    width, hidden = MODEL.moe_intermediate_size, MODEL.hidden_size
    shapes = {
        "model.embed_tokens.weight": (83, hidden),
        "lm_head.weight": (83, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (48, hidden),
        "model.layers.0.mlp.gate_proj.weight": (MODEL.intermediate_size, hidden),
        "model.layers.1.mlp.gate.weight": (5, hidden),
        "model.layers.1.mlp.gate.e_score_correction_bias": (5,),
        "model.layers.1.mlp.experts.4.up_proj.weight": (width, hidden),
        "model.layers.1.mlp.experts.4.down_proj.weight": (hidden, width),
        "model.layers.2.mlp.shared_experts.up_proj.weight": (width, hidden),
    }
    assert {name: hub[name].shape for name in shapes} == shapes


def test_there_and_back():
    """Every tensor returns under its name, bit for bit."""
    ours = make_weights().tensors
    back = from_hub(to_hub(ours))
    assert set(back) == set(ours)
    for name, array in ours.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight", "up_proj of expert 2 is missing"),
        ("model.layers.1.mlp.experts.4.down_proj.weight", "4 down matrices"),
        ("model.layers.0.mlp.gate_proj.weight", "has only .'up'"),
    ],
)
def test_incomplete_checkpoints_are_refused(lost: str, words: str):
    """Naming what is missing."""
    hub = to_hub(make_weights().tensors)
    del hub[lost]
    with pytest.raises(WeightsError, match=words):
        from_hub(hub)
