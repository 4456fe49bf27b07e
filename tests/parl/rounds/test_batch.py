"""From scored trajectories to samples and advantages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.types import DrawKey
from infra.errors import ConfigError
from parl.rounds.batch import make_batch, permutation_in_groups
from parl.trajectory import Trajectory
from reward_models.episode import Outcome, RewardBreakdown
from tests.parl.store.builders import make_job, make_trajectory


def trajectory(task: int, sample: int, outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    made = make_trajectory(make_job(task, sample), outcome)
    made.draw = replace(DrawKey(3, 0, 0, 0), task=task, sample=sample)
    return made


def reward(total: float | None) -> RewardBreakdown:
    return RewardBreakdown(total, {}, (), "test")


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(0, 2**63))
def test_rewards_change_owners_only_inside_a_group(groups: list[str], seed: int):
    """A permutation that keeps every group's members among themselves; a function of its seed."""
    order = permutation_in_groups(groups, seed)
    assert sorted(order) == list(range(len(groups)))
    assert [groups[i] for i in order] == groups
    assert np.array_equal(order, permutation_in_groups(groups, seed))


def test_groups_are_shuffled_apart_from_each_other():
    """Not one shuffle repeated for each group, and another one with another seed."""
    groups = ["a"] * 50 + ["b"] * 50
    order = permutation_in_groups(groups, 1)
    assert not np.array_equal(order[:50], np.arange(50))
    assert not np.array_equal(order[:50], order[50:] - 50)
    assert not np.array_equal(order, permutation_in_groups(groups, 2))


def test_advantages_are_relative_to_the_group_and_in_ledger_order():
    """Each sample keeps its own reward minus what its group got."""
    rows = [trajectory(task, sample) for task in range(2) for sample in range(2)]
    rewards = [reward(value) for value in (1.0, 0.0, 1.0, 1.0)]
    batch = make_batch(rows, rewards, advantage="group_mean")
    assert [sample.key for sample in batch.samples] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert batch.advantages == [0.5, -0.5, 0.0, 0.0] and batch.dropped == {}


def test_an_episode_without_a_reward_leaves_the_baseline_alone():
    """It is dropped with its outcome as the reason."""
    rows = [trajectory(0, 0), trajectory(0, 1, Outcome.VERIFIER_ERROR), trajectory(0, 2)]
    batch = make_batch(rows, [reward(1.0), reward(None), reward(0.0)], advantage="group_mean")
    assert batch.advantages == [0.5, -0.5]
    assert batch.dropped == {rows[1].episode_id: "no reward: outcome verifier_error"}


def test_an_episode_without_a_token_is_dropped_for_that():
    """Its prompt filled the context: there is a reward, but nothing to train on."""
    rows = [trajectory(0, sample) for sample in range(3)]
    rows[1].turns, rows[1].outcome = [], Outcome.TOKEN_BUDGET
    batch = make_batch(rows, [reward(1.0), reward(0.0), reward(0.0)], advantage="group_mean")
    assert len(batch.samples) == len(batch.advantages) == 2
    assert batch.dropped == {rows[1].episode_id: "no sampled tokens: outcome token_budget"}


def test_a_violation_is_kept_out_of_the_baseline_but_trained_on():
    """Facts: its advantage is its reward minus the mean of the others."""
    rows = [trajectory(0, 0), trajectory(0, 1, Outcome.LOOP), trajectory(0, 2)]
    batch = make_batch(rows, [reward(1.0), reward(-1.0), reward(0.0)], advantage="group_mean")
    assert batch.advantages == [0.5, -1.5, -0.5]


def test_permuted_rewards_take_the_violation_with_them():
    """The control run has the same rewards in each group, only their owners differ."""
    rows = [
        trajectory(task, sample, Outcome.LOOP if sample == 0 else Outcome.COMPLETED)
        for task in range(3)
        for sample in range(8)
    ]
    rewards = [reward(-1.0 if i % 8 == 0 else float(i % 2)) for i in range(24)]
    plain = make_batch(rows, rewards, advantage="group_mean")
    shuffled = make_batch(rows, rewards, advantage="group_mean", permute_seed=5)
    assert shuffled.advantages != plain.advantages
    for task in range(3):
        part = slice(8 * task, 8 * task + 8)
        assert sorted(shuffled.advantages[part]) == sorted(plain.advantages[part])
    again = make_batch(rows, rewards, advantage="group_mean", permute_seed=5)
    assert again.advantages == shuffled.advantages


def test_a_round_without_any_reward_is_an_empty_batch():
    """The machine turns it into a RoundError that lists the outcomes."""
    rows = [trajectory(0, sample, Outcome.ENV_ERROR) for sample in range(2)]
    batch = make_batch(rows, [reward(None)] * 2, advantage="group_mean", permute_seed=1)
    assert batch.samples == [] and batch.advantages == [] and len(batch.dropped) == 2


def test_an_unknown_estimator_is_refused():
    """ConfigError names the known ones."""
    with pytest.raises(ConfigError, match="group_mean, group_std"):
        make_batch([trajectory(0, 0)], [reward(1.0)], advantage="best")
