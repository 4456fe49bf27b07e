"""The accuracy gate: facts 3.2, including its measured flapping figures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.config import GateConfig
from reward_models.gate import GateState, update

CONFIG = GateConfig()


def rows(correct: int, total: int) -> list[float]:
    return [1.0] * correct + [0.0] * (total - correct)


def test_too_few_samples_leave_the_gate_as_it_is():
    """63 correct answers open nothing and 63 wrong ones close nothing."""
    assert not update(GateState(), rows(63, 63), CONFIG).open
    assert update(GateState(open=True), rows(0, 63), CONFIG).open


@pytest.mark.parametrize(("correct", "opens"), [(222, False), (223, True)])
def test_opens_one_standard_error_above_the_bar(correct: int, opens: bool):
    """At n = 256 the bar p - SE > 0.85 lies between 222 and 223 correct answers."""
    p = correct / 256
    assert (p - math.sqrt(p * (1 - p) / 256) > 0.85) == opens
    assert update(GateState(), rows(correct, 256), CONFIG).open == opens


@pytest.mark.parametrize(("correct", "stays"), [(205, True), (204, False)])
def test_closes_below_eighty_percent(correct: int, stays: bool):
    """Open, it holds down to p = 0.80 and closes under it."""
    assert update(GateState(open=True), rows(correct, 256), CONFIG).open == stays


@given(st.lists(st.floats(0, 1), max_size=300), st.lists(st.floats(0, 1), max_size=300))
def test_window_keeps_the_newest(first: list[float], second: list[float]):
    """However rows arrive, the window is the last W of them."""
    state = update(update(GateState(), first, CONFIG), second, CONFIG)
    assert state.recent == tuple((first + second)[-CONFIG.window :])


def flips(window: int, seed: int, *, plain: bool) -> int:
    """Changes of state in 500 updates of 16 at a true accuracy of exactly 0.85."""
    rng = random.Random(seed)
    config = GateConfig(window=window)
    state, changes = GateState(), 0
    for _ in range(500):
        before = state.open
        state = update(state, [float(rng.random() < 0.85) for _ in range(16)], config)
        if plain and len(state.recent) >= config.min_samples:
            state = GateState(state.accuracy > 0.85, state.recent)
        elif plain:
            state = GateState(before, state.recent)
        changes += state.open != before
    return changes


def test_hysteresis_hardly_flaps():
    """At W = 256 a plain threshold flips about 56 times, the gate about 3.7 times (facts 3.2)."""
    seeds = range(12)
    plain = sum(flips(256, seed, plain=True) for seed in seeds) / len(seeds)
    gated = sum(flips(256, seed, plain=False) for seed in seeds) / len(seeds)
    assert 40 < plain < 72
    assert 2 < gated < 6
