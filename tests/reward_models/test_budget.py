"""Budgets of stage 0 and the guard that suspends unfair ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.budget import feasible, token_budget, value_within
from reward_models.config import BudgetConfig
from reward_models.episode import Outcome
from reward_models.stages import RewardModel
from reward_models.state import RewardState
from tests.reward_models.episodes import config, episode, open_state

PDF = {"pdf_pages": 12.0}


@pytest.mark.parametrize(
    ("units", "budget"),
    [
        (PDF, 1440.0),
        ({"code_lines": 10.0}, 800.0),
        ({"pdf_pages": 12.0, "code_lines": 10.0}, 2240.0),
        ({"code_lines": 1.0}, 256.0),
        ({"pdf_pages": 9000.0}, 131072.0),
        ({"pdf_pages": 12.0, "moons": 3.0}, 1440.0),
        ({"moons": 3.0}, None),
        ({}, None),
    ],
)
def test_budget_formula(units: dict[str, float], budget: float | None):
    """120 a page, 80 a line, summed and clipped to [256, cap]; unknown units give none."""
    assert token_budget(units, BudgetConfig()) == budget


def test_budget_binds_only_when_the_gate_is_open():
    """The same over-long correct answer is worth 1 before the gate opens and 0 after."""
    model, long = RewardModel(config()), episode(tokens=1441, units=PDF)
    assert model.score(long, RewardState()).total == 1.0
    assert model.score(long, open_state(0)).total == 0.0
    assert model.score(episode(tokens=1440, units=PDF), open_state(0)).total == 1.0
    assert model.budget(PDF, "add", RewardState()) is None
    assert model.budget(PDF, "add", open_state(0)) == 1440.0
    assert model.budget(PDF, "add", open_state(1)) is None


def test_guard_suspends_a_budget_hardly_anyone_meets():
    """phi under 0.3 of at least 16 correct episodes: not enforced, and an event says so."""
    model = RewardModel(config(gate={"min_samples": 16}))
    rows = [episode(tokens=5000, units=PDF)] * 12 + [episode(tokens=500, units=PDF)] * 4
    state, events = model.fold(model.initial_state(), rows)
    assert state.is_open("add") and model.budget(PDF, "add", state) is None
    data = {"on": True, "phi": 0.25, "fallback": None}
    assert {"kind": "budget_guard", "key": "add", "data": data} in events
    assert model.score(rows[0], state).total == 1.0
    state, events = model.fold(state, [episode(tokens=500, units=PDF)] * 4)
    assert model.budget(PDF, "add", state) == 1440.0
    assert events[0]["data"]["on"] is False


def test_guard_needs_evidence():
    """With fewer samples than asked for nothing speaks against a budget."""
    assert feasible([False] * 15, BudgetConfig())
    assert not feasible([False] * 16, BudgetConfig())


@pytest.mark.parametrize(("tokens", "kept"), [(100, 1.0), (150, 0.75), (200, 0.5), (9999, 0.2)])
def test_soft_budget_takes_value_linearly(tokens: int, kept: float):
    """max(s_min, 1 - 0.5 (T - B) / B)."""
    assert value_within(tokens, 100, BudgetConfig(over_budget="soft")) == kept


@given(st.integers(0, 10_000), st.floats(0, 5000), st.sampled_from(["hard", "soft"]))
def test_value_is_a_share(tokens: int, budget: float, mode: str):
    """Any length against any budget, also 0: a share in [0, 1], and all of it within budget."""
    value = value_within(tokens, budget, BudgetConfig.model_validate({"over_budget": mode}))
    assert 0 <= value <= 1
    assert (value == 1) or tokens > budget


def test_a_percentile_stands_in_for_a_budget_nobody_meets():
    """What half of the correct episodes kept when the guard stepped in, and it stays that: a
    moving one would follow the policy down."""
    knobs = config(gate={"min_samples": 16}, budget={"infeasible": "percentile"})
    model = RewardModel(knobs)
    rows = [episode(tokens=4000 + 100 * i, units=PDF) for i in range(16)]
    state, _ = model.fold(model.initial_state(), rows)
    assert model.budget(PDF, "add", state) == pytest.approx(4700)
    assert model.score(rows[7], state).total == 1.0 and model.score(rows[8], state).total == 0.0
    later, _ = model.fold(state, [episode(tokens=3000, units=PDF)] * 16)
    assert model.budget(PDF, "add", later) == pytest.approx(4700)
    # half the pages, half the tokens; still inside [minimum, cap]; unknown units have none
    assert model.budget({"pdf_pages": 6.0}, "add", later) == pytest.approx(2350)
    assert model.budget({"pdf_pages": 0.1}, "add", later) == 256
    assert model.budget({"moons": 1.0}, "add", later) is None


def test_a_hard_item_of_an_easy_type_has_no_budget():
    """Toggle's second gate: under 80 % of the group correct, length costs nothing."""
    model, long = RewardModel(config()), episode(tokens=1441, units=PDF)
    wrong = episode(correctness=0.0, units=PDF)
    ours = episode(correctness=None, outcome=Outcome.INFRA_ERROR)
    easy, hard = [long] * 4 + [wrong], [long] * 3 + [wrong] * 2
    assert model.score(long, open_state(0), easy).total == 0.0
    assert model.score(long, open_state(0), hard).total == 1.0
    assert model.score(long, open_state(0), [*easy, ours]).total == 0.0
    off = RewardModel(config(group_gate={"enabled": False}))
    assert off.score(long, open_state(0), hard).total == 0.0
    groups = {"a": easy, "b": hard}
    by_prompt = [replace(e, group_key=key) for key, group in groups.items() for e in group]
    totals = [answer.total for answer in model.score_all(by_prompt, open_state(0))]
    assert totals == [0.0] * 4 + [0.0] + [1.0] * 3 + [0.0] * 2
