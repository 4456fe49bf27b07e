"""Stage 1: the efficiency term, its floor and how the floor is estimated (facts 3.3, 3.4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.config import EfficiencyConfig
from reward_models.efficiency import (
    efficiency,
    minimum_tokens,
    quantile,
    refreshed_minimum,
)
from reward_models.stages import RewardModel
from tests.reward_models.episodes import config, episode, open_state

CONFIG = EfficiencyConfig()


@pytest.mark.parametrize(
    ("tokens", "value"),
    [(0, 0.0), (129, 0.0), (130, 1.0), (565, 0.5), (1000, 0.0), (5000, 0.0)],
)
def test_efficiency_falls_from_floor_to_reference(tokens: int, value: float):
    """m = 100, L_ref = 1000: nothing under F = 130, 1 at F, linear to 0 at L_ref."""
    assert efficiency(tokens, 100, 1000, CONFIG) == value


@pytest.mark.parametrize(("tokens", "value"), [(100, 0.0), (115, 0.5), (90, 0.0), (130, 1.0)])
def test_tent_falls_from_floor_to_minimum(tokens: int, value: float):
    """floor_mode = tent is linear between m and F instead of a cliff."""
    tent = EfficiencyConfig(floor_mode="tent")
    assert efficiency(tokens, 100, 1000, tent) == pytest.approx(value)


def test_no_room_between_floor_and_reference_is_no_reward():
    """L_ref at or under F leaves nothing to earn and divides by nothing."""
    assert efficiency(130, 100, 130, CONFIG) == 0.0


@given(st.integers(0, 2000), st.integers(0, 2000), st.sampled_from(["none", "penalty", "tent"]))
def test_above_the_floor_shorter_is_never_worse(first: int, second: int, mode: str):
    """Monotone in T above F whatever happens below it, and always in [0, 1]."""
    settings = EfficiencyConfig.model_validate({"floor_mode": mode})
    short, long = sorted((first, second))
    values = [efficiency(t, 100, 1000, settings) for t in (short, long)]
    assert all(0 <= value <= 1 for value in values)
    assert short < 130 or values[0] >= values[1]


def test_penalty_takes_from_what_is_too_short():
    """C (1 - w_f) below the floor, under its own name."""
    model = RewardModel(config(efficiency={"floor_mode": "penalty"}))
    answer = model.score(episode(tokens=129), open_state(1))
    assert answer.parts == {"correct": 1.0, "efficiency": 0.0, "below_floor": -0.2}
    assert answer.total == 0.8


@given(st.lists(st.integers(1, 100), min_size=1), st.floats(0.01, 1))
def test_quantile_is_a_member_with_enough_below(values: list[int], q: float):
    """Nearest rank: at least a share q of the values is at most the quantile."""
    found = quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values) - 1e-9


def test_minimum_needs_four_correct_answers():
    """Three correct answers leave what was known."""
    assert refreshed_minimum([10, 10, 10], None, CONFIG) is None
    assert refreshed_minimum([10, 10, 10], 50, CONFIG) == 50
    assert refreshed_minimum([10, 11, 12, 13], None, CONFIG) == 10


def test_one_lucky_guess_does_not_move_the_floor():
    """q10, not the minimum: one 3-token guess among 30 answers of 100 changes nothing."""
    assert refreshed_minimum([3, *[100] * 29], None, CONFIG) == 100


def test_floor_falls_by_a_tenth_at_most():
    """A refresh may raise the floor freely but lower it by 10 % only."""
    assert refreshed_minimum([10] * 8, 100, CONFIG) == 90
    assert refreshed_minimum([300] * 8, 100, CONFIG) == 300


def test_minimum_is_the_authors_or_the_measured_one_whichever_is_larger():
    """m(x) = max(author, rate * u(x)); None when nobody knows."""
    assert minimum_tokens(None, None, 3) is None
    assert minimum_tokens(50, None, 3) == 50
    assert minimum_tokens(50, 20, 3) == 60
    assert minimum_tokens(70, 20, 3) == 70


def test_floor_grows_with_the_size_of_the_task():
    """Measured in tokens per unit, so that long documents are not held to short ones' floor."""
    model = RewardModel(config(gate={"min_samples": 8}, schedule={"kind": "stage1"}))
    rows = [episode(tokens=100, units={"calls": 1.0}), episode(tokens=400, units={"calls": 4.0})]
    state, _ = model.fold(model.initial_state(), rows * 8)
    one = model.score(episode(tokens=129, units={"calls": 1.0}), state)
    four = model.score(episode(tokens=129, units={"calls": 4.0}), state)
    assert "floor 130" in one.reasons[0] and "floor 520" in four.reasons[0]
