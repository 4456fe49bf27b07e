"""Inverse-CDF sampling: the right distribution, and logprobs of what was really sampled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import InvalidStateError
from engine.light.sampler import check_sampling, sample
from engine.runtime.types import Sampling

LOGITS = np.array([[1.0, 3.0, 0.5, 2.0, -1.0]], np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def test_a_draw_walks_the_tokens_in_order():
    """Token i is drawn for u in [cdf(i - 1), cdf(i))."""
    cdf = softmax(LOGITS[0]).cumsum()
    for token in range(5):
        low = cdf[token - 1] if token else 0.0
        for u in (low + 1e-9, cdf[token] - 1e-9):
            ids, logprobs = sample(LOGITS, np.array([u]), [Sampling()])
            assert ids[0] == token
            np.testing.assert_allclose(logprobs[0], np.log(softmax(LOGITS[0])[token]), rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_p=0.7), [1, 3]),
        (Sampling(top_p=0.05), [1]),
        (Sampling(temperature=2.0, top_k=4, top_p=0.9), [0, 1, 2, 3]),
    ],
)
def test_frequencies_and_logprobs_follow_the_truncated_distribution(
    params: Sampling, kept: list[int]
):
    """2,000 evenly spread draws hit each token as often as its probability says."""
    u = (np.arange(2_000) + 0.5) / 2_000
    ids, logprobs = sample(np.repeat(LOGITS, 2_000, axis=0), u, [params] * 2_000)
    scaled = np.full(5, -np.inf)
    scaled[kept] = LOGITS[0, kept] / params.temperature
    expected = softmax(scaled)
    np.testing.assert_allclose(np.bincount(ids, minlength=5) / 2_000, expected, atol=1e-3)
    np.testing.assert_allclose(np.exp(logprobs), expected[ids], rtol=1e-5)


def test_greedy_takes_the_best_token_for_certain():
    """temperature 0: logprob 0, whatever the draw; other rows are not affected."""
    params = [Sampling(temperature=0), Sampling()]
    ids, logprobs = sample(np.repeat(LOGITS, 2, axis=0), np.array([0.999, 1e-6]), params)
    assert (ids.tolist(), logprobs[0]) == ([1, 0], 0.0)


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float32, (4, 7), elements=st.floats(-80, 80, width=32)),
    st.lists(st.floats(1e-16, 1 - 1e-16), min_size=4, max_size=4),
)
def test_every_draw_gives_a_token_with_weight(logits: np.ndarray, draws: list[float]):
    """Extreme logits and draws at the edges: never a token that has probability 0."""
    ids, logprobs = sample(logits, np.array(draws), [Sampling()] * 4)
    assert ((ids >= 0) & (ids < 7)).all() and np.isfinite(logprobs).all() and (logprobs <= 0).all()


@pytest.mark.parametrize(
    "params", [Sampling(temperature=-1), Sampling(top_p=0), Sampling(top_p=1.1), Sampling(top_k=-1)]
)
def test_settings_that_name_no_distribution_are_refused(params: Sampling):
    """One line that shows the setting."""
    with pytest.raises(InvalidStateError, match="expected temperature"):
        check_sampling(params)
