"""QK-Clip: heads over the limit come down to it, all others keep their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.model import Layer
from engine.model.sequences import forward_sequences
from parl.learner.optim.qk_clip import QKClip
from parl.trajectory import TrainingSample
from tests.parl.learner.tiny import MODEL, make_advantages, make_learner, make_model, make_samples

HEADS, SIZE, LAYERS = MODEL.num_attention_heads, MODEL.head_dim, MODEL.num_hidden_layers


def sharp_model(factor: float = 6.0):
    """Head 1 of layer 0 has far larger queries than the others."""
    model = make_model()
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    with torch.no_grad():
        layer.self_attn.q_proj.view(HEADS, SIZE, -1)[1] *= factor
    return model


def watched(model, clip: QKClip) -> Tensor:
    """Scores of two sequences, the second one padded."""
    ids = torch.randint(0, MODEL.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    forward_sequences(model, ids, torch.tensor([9, 4]), watch=clip.watch)
    return clip.max_scores.clone()


def test_scores_are_those_of_the_causal_product_over_real_tokens():
    """Against a loop over sequences, heads and positions; the future does not count."""
    model = sharp_model()
    seen: list[tuple[int, Tensor, Tensor]] = []
    ids = torch.randint(0, MODEL.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    forward_sequences(
        model,
        ids,
        torch.tensor([9, 4]),
        watch=lambda layer, q, k: seen.append((layer, q.detach(), k.detach())),
    )
    scores = watched(model, QKClip(model, 100.0))
    for layer, q, k in seen:
        for head in range(HEADS):
            best = max(
                float(q[b, head, i] @ k[b, head * k.shape[1] // HEADS, j]) * SIZE**-0.5
                for b, length in enumerate((9, 4))
                for i in range(length)
                for j in range(i + 1)
            )
            assert float(scores[layer, head]) == pytest.approx(max(best, 0.0), abs=1e-5)


def test_a_head_over_the_limit_comes_down_to_it_and_no_other_moves():
    """The same batch then scores exactly tau in that head; keys and other heads are untouched."""
    model = sharp_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = watched(model, QKClip(model, 100.0))
    tau = float(first[0].max()) / 3
    assert (first > tau).sum() == 1, "one head stands out"
    clip = QKClip(model, tau)
    highest = clip.step(watched(model, clip))
    assert highest == float(first.max()) and not clip.max_scores.any()
    assert float(watched(model, QKClip(model, 100.0))[0, 1]) == pytest.approx(tau, rel=1e-5)
    for name, value in model.state_dict().items():
        if name == "layers.0.self_attn.q_proj":
            changed = value.view(HEADS, SIZE, -1) != before[name].view(HEADS, SIZE, -1)
            assert changed[1].all() and not changed[0].any()
        else:
            assert torch.equal(value, before[name]), name


@pytest.fixture
def samples() -> list[TrainingSample]:
    return make_samples(make_model())


def test_the_step_itself_is_not_altered(samples: list[TrainingSample]):
    """The clip comes after the optimizer: with it or without, loss and gradient norm agree."""
    gains = make_advantages(12)
    loose = make_learner(optim={"qk_clip": 1e6}).update(samples, gains)
    tight = make_learner(optim={"qk_clip": 1e-3}).update(samples, gains)
    assert loose == {**tight, "peak_memory_mib": loose["peak_memory_mib"]}
    assert loose["max_attention_score"] > 1e-3


def test_supervised_steps_clip_too(samples: list[TrainingSample]):
    """A warm start may not leave heads that the first round cannot train."""
    learner = make_learner(optim={"qk_clip": 0.01})
    # a clip below moves the inputs of the layers above, so one step need not be enough for all
    scores = [
        learner.sft_update(samples, 0.0, 0.0)["max_attention_score"] for _ in range(LAYERS + 2)
    ]
    assert scores[0] > 0.01 and scores[-1] <= 0.01 * (1 + 1e-4)
