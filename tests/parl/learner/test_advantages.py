"""Group-relative advantages (K2.5 4.4.2, facts 3.5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from parl.learner.advantages import ESTIMATORS, advantages_for
from parl.learner.advantages.decoupled import FLOOR

NONE = np.zeros(8, dtype=bool)
rewards_of_groups = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(-1, 2, allow_subnormal=False), st.booleans()),
    min_size=1,
    max_size=24,
)


def split(rows: list[tuple[str, float, bool]]) -> tuple[np.ndarray, list[str], np.ndarray]:
    groups, rewards, violation = zip(*rows, strict=True)
    return np.array(rewards), list(groups), np.array(violation)


def test_mean_of_the_own_group_is_taken_off():
    """Each prompt is its own baseline, however groups are interleaved."""
    rewards = np.array([1.0, 5.0, 0.0, 7.0])
    found = advantages_for("group_mean", rewards, ["x", "y", "x", "y"], np.zeros(4, bool))
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_a_violator_does_not_make_wrong_look_acceptable():
    """Violators stay out of the mean and are measured against the rest."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0, -1.0])
    violation = np.array([False, False, False, False, True])
    found = advantages_for("group_mean", rewards, ["x"] * 5, violation)
    assert found.tolist() == [0.5, -0.5, -0.5, 0.5, -1.5]


def test_a_group_of_violators_has_only_itself():
    """With nobody else to compare to, equal violators get no gradient."""
    found = advantages_for("group_mean", np.full(3, -1.0), ["x"] * 3, np.ones(3, bool))
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", sorted(ESTIMATORS))
@given(rewards_of_groups, st.floats(-5, 5, allow_subnormal=False))
def test_adding_a_constant_to_all_rewards_changes_nothing(
    kind: str, rows: list[tuple[str, float, bool]], constant: float
):
    """Additive-constant invariance, up to rounding."""
    rewards, groups, violation = split(rows)
    # spreads of rounding size are either 0 or huge after division: not what this is about
    rewards = rewards.round(3)
    before = advantages_for(kind, rewards, groups, violation)
    after = advantages_for(kind, rewards + constant, groups, violation)
    np.testing.assert_allclose(before, after, atol=1e-9)


@given(rewards_of_groups)
def test_honest_advantages_sum_to_zero(rows: list[tuple[str, float, bool]]):
    """In each group the rest, violators left out, shares a zero sum."""
    rewards, groups, violation = split(rows)
    found = advantages_for("group_mean", rewards, groups, violation)
    for name in set(groups):
        honest = (np.array(groups) == name) & ~violation
        assert abs(found[honest].sum()) < 1e-9


@given(rewards_of_groups, st.randoms(use_true_random=False))
def test_order_of_episodes_does_not_matter(rows: list[tuple[str, float, bool]], rng):
    """A permutation of episodes permutes advantages and nothing else."""
    order = list(range(len(rows)))
    rng.shuffle(order)
    straight = advantages_for("group_mean", *split(rows))
    shuffled = advantages_for("group_mean", *split([rows[i] for i in order]))
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-12)


def test_weight_of_length_matters_under_mean_and_not_under_std():
    """The trap of group_std: in an all-correct group w cancels; under group_mean the spread is
    w times the spread of E."""
    length_term = np.linspace(0, 1, 8)
    for kind, ratio in (("group_mean", 10.0), ("group_std", 1.0)):
        small, large = (
            np.ptp(advantages_for(kind, 1 + w * length_term, ["x"] * 8, NONE)) for w in (0.05, 0.5)
        )
        assert large / small == pytest.approx(ratio)


@pytest.mark.parametrize("kind", sorted(ESTIMATORS))
def test_a_missing_reward_is_refused(kind: str):
    """None became nan somewhere: a baseline must not swallow it."""
    with pytest.raises(AssertionError, match="without a reward"):
        advantages_for(kind, np.array([1.0, np.nan]), ["x", "x"], np.zeros(2, bool))


def test_unknown_estimator_names_the_known():
    """The message lists what there is."""
    with pytest.raises(ConfigError, match="group_mean, group_std"):
        advantages_for("gae", np.zeros(1), ["x"], np.zeros(1, bool))


def test_a_floor_keeps_the_weight_of_length():
    """decoupled: group_std where answers differ, group_mean over the floor where all are right, so
    that the weight of length counts and no divisor is more than twice another."""
    mixed = np.array([1.0, 0, 0, 0, 0, 0, 0, 0])
    first, second = (advantages_for(k, mixed, ["x"] * 8, NONE) for k in ("decoupled", "group_std"))
    np.testing.assert_array_equal(first, second)
    length_term = np.linspace(0, 1, 8)
    small, large = (
        np.ptp(advantages_for("decoupled", 1 + w * length_term, ["x"] * 8, NONE))
        for w in (0.05, 0.5)
    )
    assert large / small == pytest.approx(10.0)
    assert small == pytest.approx(0.05 / FLOOR)
    # the trap: a spread over the floor and the weight is gone
    spreads = [
        np.ptp(advantages_for("decoupled", 1 + w * length_term, ["x"] * 8, NONE)) for w in (2, 4)
    ]
    assert spreads[0] == pytest.approx(spreads[1])
