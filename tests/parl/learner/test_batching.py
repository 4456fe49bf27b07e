"""Micro-batches and shards: every sample once, within the budget, in one order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parl.learner.batching import micro_batches, shards, split
from parl.trajectory import TrainingSample
from tests.parl.learner.tiny import make_model, make_samples

lengths_of = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def sample(index: int, length: int) -> TrainingSample:
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return TrainingSample(
        key=(0, index, 0),
        token_ids=np.arange(length, dtype=np.int32) + index,
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        experts=None,
        weight_version=0,
    )


@given(lengths_of, st.integers(1, 200))
def test_split_holds_every_sample_once_within_the_budget(lengths: list[int], budget: int):
    """Padded size at most the budget, unless one sample alone exceeds it."""
    batches = split([sample(i, n) for i, n in enumerate(lengths)], budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(lengths_of, st.integers(1, 200), st.randoms(use_true_random=False))
def test_split_does_not_depend_on_input_order(lengths: list[int], budget: int, rng: random.Random):
    """The same samples in another order give the same micro-batches in the same order."""
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    shuffled = samples.copy()
    rng.shuffle(shuffled)
    keys = [[samples[i].key for i in batch] for batch in split(samples, budget)]
    assert keys == [[shuffled[i].key for i in batch] for batch in split(shuffled, budget)]


@given(lengths_of, st.integers(1, 6))
def test_shards_hold_every_sample_once_and_are_balanced(lengths: list[int], count: int):
    """Loads differ by at most the longest sample; nobody idles while others have two."""
    parts = shards([sample(i, n) for i, n in enumerate(lengths)], count)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths)
    assert min(map(len, parts)) >= min(1, len(lengths) // count)


def test_padding_holds_what_the_samples_hold():
    """Tokens, masks, logprobs, advantages and experts stand at their positions; the rest is 0."""
    samples = make_samples(make_model(), 5)
    gains = [0.1, 0.2, 0.3, 0.4, 0.5]
    seen = 0
    order = split(samples, 64)
    for indices, batch in zip(
        order, micro_batches(samples, gains, 64, with_experts=True), strict=True
    ):
        assert batch.experts is not None
        for row, index in enumerate(indices):
            one, n = samples[index], len(samples[index].token_ids)
            assert batch.token_ids[row, :n].tolist() == one.token_ids.tolist()
            assert batch.mask[row, :n].tolist() == one.loss_mask.astype(bool).tolist()
            assert batch.old_logprobs[row, :n].tolist() == one.logprobs.tolist()
            assert batch.advantages[row, :n].tolist() == [np.float32(gains[index])] * n
            assert one.experts is not None
            assert batch.experts[row, : n - 1].tolist() == one.experts.tolist()
            assert not batch.mask[row, n:].any() and not batch.token_ids[row, n:].any()
            seen += 1
    assert seen == 5


def test_training_on_the_first_token_is_refused():
    """Nothing predicts it; silently it would be predicted from another sequence's end."""
    bad = sample(0, 5)
    bad.loss_mask[0] = 1
    with pytest.raises(AssertionError, match="nothing predicts it"):
        list(micro_batches([bad], [1.0], 64, with_experts=False))
