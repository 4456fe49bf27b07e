"""Exact binomial bounds against the textbook and against sums."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.check.binomial import cumulative, upper_bound


@pytest.mark.parametrize(
    ("failures", "trials", "bound"),
    [(0, 10, 1 - 0.05**0.1), (0, 59, 1 - 0.05 ** (1 / 59)), (1, 10, 0.3941633), (10, 10, 1.0)],
)
def test_known_bounds(failures: int, trials: int, bound: float):
    """No failure: 1 - alpha^(1/n) (the "rule of three"); one in ten: from the tables."""
    assert upper_bound(failures, trials) == pytest.approx(bound, abs=1e-6)


@given(st.integers(1, 60), st.data(), st.floats(0.5, 0.999))
def test_the_bound_is_where_the_tail_has_the_wanted_mass(trials: int, data, confidence: float):
    """At the bound, as few failures as were seen have probability 1 - confidence."""
    failures = data.draw(st.integers(0, trials - 1))
    bound = upper_bound(failures, trials, confidence)
    assert failures / trials <= bound < 1
    assert cumulative(failures, trials, bound) == pytest.approx(1 - confidence, abs=1e-9)


@given(st.integers(1, 40), st.floats(0.01, 0.99))
def test_cumulative_is_the_sum_of_the_probabilities(trials: int, p: float):
    for k in range(trials + 1):
        direct = sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(k + 1))
        assert cumulative(k, trials, p) == pytest.approx(direct, abs=1e-9)


@pytest.mark.parametrize("wrong", [(-1, 3, 0.95), (4, 3, 0.95), (1, 3, 1.0)])
def test_nonsense_is_refused(wrong: tuple):
    with pytest.raises(ValueError, match="expected"):
        upper_bound(*wrong)
