"""The learner reads the far tokens that the engine read."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.sequences import forward_sequences
from parl.learner.batching import micro_batches
from parl.learner.config import LearnerConfig
from parl.learner.forward import token_stats
from parl.learner.learner import TokenLearner
from parl.trajectory import TrainingSample
from tests.parl.learner.tiny import MODEL, make_advantages

HYBRID = ModelConfig.model_validate(
    MODEL.model_dump()
    | {
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention": {
            "mode": "hybrid",
            "hot": 40,
            "hybrid": {"window": 16, "topk": 4, "dense_below": 0},
        },
    }
)


@pytest.fixture(scope="module")
def model() -> PolicyModel:
    """Random everywhere: the shipped zero head would give every token the same probability."""
    made = PolicyModel(HYBRID, 3)
    assert made.lm_head is not None
    with torch.no_grad():
        made.lm_head.normal_(generator=torch.Generator().manual_seed(3))
    return made


def sample(model: PolicyModel, index: int, length: int) -> TrainingSample:
    """As an engine reports it: logprobs, experts and selections of one unpadded sequence."""
    ids = np.random.default_rng(index).integers(0, MODEL.vocab_size, length).astype(np.int32)
    layers: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        hidden, experts, _ = forward_sequences(
            model,
            torch.from_numpy(ids.astype(np.int64))[None],
            torch.tensor([length]),
            watch_choice=lambda layer, chosen: layers.update({layer: chosen[0]}),
        )
        table = model.logits(hidden).log_softmax(-1)
    picked = table[:-1].gather(1, torch.from_numpy(ids[1:, None].astype(np.int64)))[:, 0]
    selections = torch.stack([layers[i] for i in range(len(layers))], dim=1)
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return TrainingSample(
        key=(0, index, 0),
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.concatenate([np.zeros(1, np.float32), picked.numpy()]),
        experts=experts[:-1].numpy().astype(np.int16),
        weight_version=0,
        selections=selections[:-1].numpy(),
    )


@pytest.fixture(scope="module")
def samples(model: PolicyModel) -> list[TrainingSample]:
    return [sample(model, index, length) for index, length in enumerate([150, 97, 30, 131])]


def test_a_padded_batch_agrees_with_what_was_recorded(
    model: PolicyModel, samples: list[TrainingSample]
):
    """No flip, the same log-probabilities; selections are there and change the result."""
    learner = TokenLearner(deepcopy(model), LearnerConfig())
    metrics = learner.update(samples, make_advantages(4))
    assert metrics["max_abs_dlogp"] < 1e-4 and metrics["expert_flip_share"] == 0
    assert metrics["selection_flip_share"] == 0
    selections = samples[0].selections
    assert selections is not None and int((selections >= 0).sum()) > 1000


def test_another_recorded_choice_is_replayed_and_counted(
    model: PolicyModel, samples: list[TrainingSample]
):
    """One head of one position read token 33 instead: its logprob moves, one flip is counted, and
    its token does not count as clean. Without replay nothing moves."""
    given = samples[0].selections
    assert given is not None
    changed = given.copy()
    where = (140, 1, 0, 0)
    assert 33 not in changed[where]
    changed[where] = np.sort(np.r_[33, changed[where][1:]])
    other = replace(samples[0], selections=changed)

    def stats(replayed: bool, one: TrainingSample):
        (batch,) = micro_batches([one], [1.0], 512, with_experts=True, with_selections=replayed)
        with torch.no_grad():
            return token_stats(model, batch)

    right, wrong, own = stats(True, samples[0]), stats(True, other), stats(False, other)
    moved = (wrong.logprobs - right.logprobs).abs()
    assert moved[:140].max() < 1e-6 < moved[140]
    assert wrong.selection_flips == 1 and right.selection_flips == 0
    assert wrong.selections == right.selections == int((given >= 0).sum())
    assert bool(wrong.flipped[140]) and not bool(right.flipped.any())
    assert torch.equal(own.logprobs, right.logprobs) and own.selections == 0


def test_padding_of_selections_is_no_choice(samples: list[TrainingSample]):
    """Shorter samples are filled with -1; a sample without selections turns the replay off."""
    (batch,) = micro_batches(samples, [1.0] * 4, 4096, with_experts=True, with_selections=True)
    assert batch.selections is not None
    for row, one in enumerate(sorted(samples, key=lambda s: len(s.token_ids))):
        assert one.selections is not None
        n = len(one.selections)
        assert np.array_equal(batch.selections[row, :n].numpy(), one.selections)
        assert bool((batch.selections[row, n:] == -1).all())
    bare = [*samples, replace(samples[0], selections=None, key=(0, 9, 0))]
    (batch,) = micro_batches(bare, [1.0] * 5, 4096, with_experts=True, with_selections=True)
    assert batch.selections is None


def test_a_window_over_everything_is_full_attention(model: PolicyModel):
    """Also its gradients."""
    full = PolicyModel(ModelConfig.model_validate(HYBRID.model_dump() | {"attention": {}}), 3)
    wide = HYBRID.model_dump()
    wide["attention"] |= {"hot": 256, "hybrid": {"window": 256, "dense_below": 0}}
    other = PolicyModel(ModelConfig.model_validate(wide), 3)
    for one in (full, other):
        one.load_state_dict(model.state_dict())
    ids = torch.randint(0, MODEL.vocab_size, (2, 120), generator=torch.Generator().manual_seed(5))
    found = []
    for one in (full, other):
        hidden, _, _ = forward_sequences(one, ids, torch.tensor([120, 77]))
        (one.logits(hidden).log_softmax(-1)[:, 3].sum() / 100).backward()
        found.append((hidden, [p.grad for p in one.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
