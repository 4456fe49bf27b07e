"""Composition, schedule and the invariants of facts 3.5."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_models.config import RewardConfig
from reward_models.episode import Episode, Outcome
from reward_models.stages import FORMULA_VERSION, RewardModel
from reward_models.state import RewardState
from tests.reward_models.episodes import BROKEN, OURS, SCORED, config, episode, episodes, open_state

SMALL = {"gate": {"window": 32, "min_samples": 8}}
STATES = [RewardState(), RewardState(stage=1), open_state(0), open_state(1)]
CONFIGS = [
    config(),
    config(budget={"over_budget": "soft", "minimum": 0}),
    config(efficiency={"floor_mode": "penalty"}),
    config(efficiency={"floor_mode": "tent", "floor_factor": 1.0}),
]
rounds = st.lists(st.lists(episodes(), max_size=24), max_size=6)


@given(episodes(), st.sampled_from(CONFIGS), st.sampled_from(STATES))
def test_parts_sum_to_the_total_in_any_order(row: Episode, knobs: RewardConfig, state: RewardState):
    """Exactly, also when the ledger returns the parts by name; None only when unscored."""
    answer = RewardModel(knobs).score(row, state)
    assert (answer.total is None) == (row.outcome in OURS)
    assert answer.formula_version == FORMULA_VERSION and answer.reasons[0]
    if answer.total is not None:
        assert math.fsum(answer.parts.values()) == answer.total
        assert math.fsum(value for _, value in sorted(answer.parts.items())) == answer.total


@pytest.mark.parametrize("outcome", OURS)
def test_our_own_failures_have_no_reward(outcome: Outcome):
    """Neither 0 nor a default: None, and no part either."""
    answer = RewardModel(config()).score(episode(correctness=None, outcome=outcome), open_state(1))
    assert answer.total is None and answer.parts == {}


@given(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.sampled_from(SCORED),
    st.sampled_from(BROKEN),
    st.sampled_from(CONFIGS),
    st.sampled_from(STATES),
)
def test_correct_beats_wrong_beats_violation(
    right: int,
    wrong: int,
    broken: int,
    outcome: Outcome,
    violation: Outcome,
    knobs: RewardConfig,
    state: RewardState,
):
    """Whatever their lengths. A hard budget alone may put correct level with wrong."""
    model = RewardModel(knobs)
    units = {"calls": 3.0}
    best = model.score(episode(tokens=right, units=units), state)
    bad = model.score(episode(correctness=0.0, tokens=wrong, outcome=outcome, units=units), state)
    worst = model.score(
        episode(correctness=0.0, tokens=broken, outcome=violation, units=units), state
    )
    assert best.total is not None and bad.total is not None and worst.total is not None
    assert bad.total > worst.total
    hard = knobs.budget.over_budget == "hard" and best.parts.get("over_budget", 0.0) < 0
    assert best.total > bad.total or (hard and best.total == bad.total)


@given(st.integers(0, 3000), st.sampled_from(CONFIGS), st.sampled_from(STATES))
def test_length_means_nothing_to_a_wrong_answer(
    tokens: int, knobs: RewardConfig, state: RewardState
):
    """A wrong answer is worth 0 at any length, in any stage: brevity alone earns nothing."""
    row = episode(correctness=0.0, tokens=tokens, units={"calls": 3.0})
    assert RewardModel(knobs).score(row, state).total == 0.0


@given(st.integers(130, 3000), st.integers(130, 3000), st.sampled_from(CONFIGS[:3]))
def test_shorter_is_never_worse_above_the_floor(first: int, second: int, knobs: RewardConfig):
    """Monotone in T from F = 130 up, at most 1 + w, and at least the plain correct value."""
    model, state = RewardModel(knobs), open_state(1)
    short, long = sorted((first, second))
    totals = [model.score(episode(tokens=t), state).total for t in (short, long)]
    assert totals[0] is not None and totals[1] is not None
    assert 1 + knobs.efficiency.weight >= totals[0] >= totals[1] >= 1


def test_going_under_the_floor_gains_nothing():
    """No length under F = 130 is worth more than F itself."""
    model, state = RewardModel(config()), open_state(1)
    at_floor = model.score(episode(tokens=130), state).total
    assert at_floor == 1.2
    assert all(model.score(episode(tokens=t), state).total == 1.0 for t in range(130))


def test_efficiency_counts_only_in_a_gated_type_of_stage_one():
    """Stage 0, or a type whose gate is shut, leaves R = C."""
    model = RewardModel(config())
    assert model.score(episode(tokens=130), open_state(0)).total == 1.0
    assert model.score(episode(tokens=130, task_type="lookup"), open_state(1)).total == 1.0
    assert model.score(episode(tokens=130), open_state(1)).parts == {
        "correct": 1.0,
        "efficiency": 0.2,
    }


def test_partly_correct_earns_its_share():
    """R = C (1 + w E) with C = 0.5."""
    assert RewardModel(config()).score(
        episode(correctness=0.5, tokens=130), open_state(1)
    ).total == pytest.approx(0.6)


def test_a_violation_never_counts_as_correct():
    """Whatever it had reached: reward -rho, and the gate hears 0."""
    model = RewardModel(config(violation=0.5, gate={"min_samples": 4}))
    rows = [episode(outcome=Outcome.LOOP, correctness=1.0)] * 4
    assert model.score(rows[0], RewardState()).total == -0.5
    state, _ = model.fold(model.initial_state(), rows)
    assert state.of("add").gate.accuracy == 0 and state.of("add").correct_tokens == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"violation": 0},
        {"efficiency": {"floor_penalty": 1.0}},
        {"budget": {"soft_floor": 0.0}},
    ],
)
def test_knobs_that_break_the_order_are_refused(bad: dict[str, object]):
    """rho = 0, a floor penalty of everything or a soft floor of 0 would level what must differ."""
    with pytest.raises(ValueError, match=r"greater than|less than"):
        config(**bad)


# -- the fold -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(rounds, st.sampled_from([config(**SMALL), config(**SMALL, schedule={"kind": "toggle"})]))
def test_rescoring_from_the_ledger_gives_the_same_rewards(
    updates: list[list[Episode]], knobs: RewardConfig
):
    """Through JSON at every step or folded in one go: the same states, rewards and events."""
    model, again = RewardModel(knobs), RewardModel(RewardConfig.model_validate(knobs.model_dump()))
    state, other = model.initial_state(), again.initial_state()
    for rows in updates:
        assert [model.score(r, state) for r in rows] == [again.score(r, other) for r in rows]
        state, events = model.fold(state, rows)
        other = RewardState.from_json(other.to_json())
        other, repeated = again.fold(other, rows)
        assert events == repeated and json.loads(json.dumps(events)) == events
        assert RewardState.from_json(state.to_json()) == state == other


@settings(max_examples=40)
@given(rounds)
def test_folding_leaves_the_old_state_alone(updates: list[list[Episode]]):
    """A state is a value: rounds already scored with it can be scored with it again."""
    model = RewardModel(config(**SMALL))
    state = model.initial_state()
    for rows in updates:
        text = state.to_json()
        after, _ = model.fold(state, rows)
        assert state.to_json() == text
        state = after


@given(st.lists(episodes(), max_size=12))
def test_our_own_failures_leave_no_trace_in_the_state(rows: list[Episode]):
    """Unscored episodes enter no window, no traffic share and no gate."""
    model = RewardModel(config(**SMALL))
    scored = [row for row in rows if row.outcome not in OURS]
    assert model.fold(open_state(1), rows) == model.fold(open_state(1), scored)


def good(task_type: str, count: int = 16) -> list[Episode]:
    return [episode(task_type=task_type, tokens=150 + i) for i in range(count)]


def bad(task_type: str, count: int = 16) -> list[Episode]:
    return [episode(task_type=task_type, correctness=0.0)] * count


def run(model: RewardModel, updates: list[list[Episode]]) -> tuple[list[int], RewardState]:
    state, stages = model.initial_state(), []
    for rows in updates:
        state, _ = model.fold(state, rows)
        stages.append(state.stage)
    return stages, state


def test_stage_one_after_enough_open_updates():
    """Two open types for N = 3 consecutive updates, not earlier."""
    model = RewardModel(config(**SMALL, schedule={"open_updates": 3}))
    stages, state = run(model, [good("add") + good("lookup")] * 4)
    assert stages == [0, 0, 1, 1] and state.in_force("add")


def test_one_type_is_not_enough():
    """min_types = 2: a single open type keeps stage 0 even with all the traffic."""
    model = RewardModel(config(**SMALL, schedule={"open_updates": 1}))
    assert run(model, [good("add")] * 4)[0] == [0] * 4


def test_open_types_without_traffic_do_not_count():
    """A type that no longer comes is not one of the two."""
    model = RewardModel(config(**SMALL, schedule={"open_updates": 2}))
    assert run(model, [good("add") + good("lookup"), good("add"), good("add")])[0] == [0, 0, 0]


def test_too_little_traffic_in_open_types():
    """Two of three types open with two thirds of the traffic: under 80 %."""
    model = RewardModel(config(**SMALL, schedule={"open_updates": 1}))
    assert run(model, [good("add") + good("lookup") + bad("hard")] * 3)[0] == [0] * 3


def test_back_when_a_gate_closes():
    """Stage 1 ends with the gate that carried it and needs N updates to return."""
    model = RewardModel(config(**SMALL, schedule={"open_updates": 2}))
    fine, broken = good("add") + good("lookup"), good("add") + bad("lookup")
    stages, _ = run(model, [fine, fine, broken, fine, fine, fine])
    assert stages == [0, 1, 0, 0, 0, 1]


def test_an_update_without_scored_episodes_moves_nothing():
    """A round lost to infrastructure neither ends stage 1 nor breaks the streak."""
    model = RewardModel(config(**SMALL, schedule={"open_updates": 2}))
    lost = [episode(correctness=None, outcome=Outcome.INFRA_ERROR)]
    assert run(model, [good("add") + good("lookup")] * 2 + [lost])[0] == [0, 1, 1]


def test_toggle_alternates():
    """kind = toggle: m = 2 updates of stage 0, two of stage 1, whatever the gates say."""
    model = RewardModel(config(schedule={"kind": "toggle", "toggle_every": 2}))
    assert [model.initial_state().stage, *run(model, [bad("add")] * 6)[0]] == [0, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(("kind", "stage"), [("stage0", 0), ("stage1", 1)])
def test_fixed_schedules_stay(kind: str, stage: int):
    """stage0 and stage1 never switch."""
    model = RewardModel(config(**SMALL, schedule={"kind": kind}))
    assert run(model, [good("add") + good("lookup"), bad("add") * 3])[0] == [stage, stage]


def test_floor_is_frozen_and_reference_runs():
    """While stage 1 lasts, shorter answers lower L_ref but not the floor they are measured from."""
    model = RewardModel(
        config(**SMALL, schedule={"kind": "stage1"}, efficiency={"reference_window": 32})
    )
    state, events = model.fold(model.initial_state(), [episode(tokens=200)] * 32)
    assert state.of("add").minimum == 200 and state.of("add").reference == 200
    assert [e["kind"] for e in events] == ["gate", "reference"]
    state, events = model.fold(state, [episode(tokens=100)] * 32)
    assert state.of("add").minimum == 200 and state.of("add").reference == 100
    assert events == [
        {"kind": "reference", "key": "add", "data": {"minimum": 200.0, "reference": 100}}
    ]


def test_floor_is_measured_when_it_comes_into_force():
    """Lengths of the time before the gate opened do not hold it up; a new stage lowers it by
    10 % only."""
    model = RewardModel(
        config(
            gate={"window": 8, "min_samples": 8},
            schedule={"kind": "stage1"},
            efficiency={"reference_window": 8},
        )
    )
    sloppy = [episode(tokens=900)] * 4 + [episode(correctness=0.0)] * 4
    state, _ = model.fold(model.initial_state(), sloppy)
    assert state.of("add").minimum is None
    state, _ = model.fold(state, [episode(tokens=100)] * 8)
    assert state.of("add").minimum == 100
    state, _ = model.fold(state, [episode(correctness=0.0)] * 8)
    assert not state.is_open("add") and state.of("add").minimum == 100
    state, _ = model.fold(state, [episode(tokens=20)] * 8)
    assert state.of("add").minimum == 90


def test_giving_up_never_beats_an_honest_answer():
    """Short wrong answers ("cannot determine") earn no more than long correct ones, ever."""
    for knobs in CONFIGS:
        for state in STATES:
            model = RewardModel(knobs)
            gave_up = model.score(episode(correctness=0.0, tokens=3, units={"calls": 1.0}), state)
            honest = model.score(episode(tokens=9000, units={"calls": 1.0}), state)
            assert gave_up.total is not None and honest.total is not None
            assert gave_up.total <= honest.total


def test_state_is_a_value():
    """Equal content, equal states; a changed counter is another state."""
    assert RewardState() == RewardState.from_json(RewardState().to_json())
    assert replace(RewardState(), num_updates=1) != RewardState()


@pytest.mark.parametrize(("num_repairs", "total"), [(0, 1.0), (1, 0.98), (5, 0.9), (50, 0.8)])
def test_repaired_calls_cost_a_share_with_a_cap(num_repairs: int, total: float):
    """A correct answer keeps most of its value however many calls had to be repaired."""
    answer = RewardModel(config()).score(episode(repairs=num_repairs), RewardState())
    assert answer.total == pytest.approx(total)
    assert ("repairs" in answer.parts) == (num_repairs > 0)


def test_repairs_take_nothing_from_a_wrong_answer():
    """0 stays 0 and a violation stays -rho: a repair is never worse than a wrong answer."""
    model = RewardModel(config())
    wrong = model.score(episode(correctness=0.0, repairs=9), RewardState())
    broken = model.score(episode(correctness=0.0, outcome=Outcome.LOOP, repairs=9), RewardState())
    assert (wrong.total, broken.total) == (0.0, -1.0)


GAVE_UP = replace(episode(), final_text="I cannot determine the answer.")


def test_giving_up_is_wrong_whatever_the_verifier_says():
    """Reward 0, and the gate hears 0; where there may be no answer, the verifier decides."""
    model = RewardModel(config(gate={"min_samples": 4}))
    answer = model.score(GAVE_UP, RewardState())
    assert answer.total == 0.0 and answer.reasons == ("gave up (completed)",)
    state, _ = model.fold(model.initial_state(), [GAVE_UP] * 4)
    assert state.of("add").gate.accuracy == 0 and state.of("add").correct_tokens == ()
    assert model.score(replace(GAVE_UP, answerable=False), RewardState()).total == 1.0
    off = RewardModel(config(giving_up={"enabled": False}))
    assert off.score(GAVE_UP, RewardState()).total == 1.0


def test_work_without_words_is_no_giving_up():
    """A task whose answer lies in files may end without a text."""
    assert RewardModel(config()).score(episode(), RewardState()).total == 1.0


def test_a_gate_closes_when_more_and_more_give_up():
    """5 points above the rate at which it opened, though accuracy alone would keep it open."""
    model = RewardModel(config(gate={"window": 100, "min_samples": 8}))
    state, _ = model.fold(model.initial_state(), [episode()] * 100)
    assert state.is_open("add") and state.of("add").given_up_at_first == 0.0
    state, events = model.fold(state, [episode()] * 95 + [GAVE_UP] * 5)
    assert state.is_open("add") and events == []
    state, events = model.fold(state, [GAVE_UP])
    assert not state.is_open("add") and events[0]["data"]["given_up"] == 0.06
    assert events[0]["data"]["accuracy"] == 0.94
    state, _ = model.fold(state, [episode()] * 96)
    assert state.is_open("add"), "it opens again once fewer do"


@pytest.mark.parametrize(("padding", "total"), [(0.0, 1.0), (0.2, 1.0), (0.6, 0.9), (1.0, 0.8)])
def test_padding_costs_a_share(padding: float, total: float):
    """Nothing up to a fifth, then linear; never below a wrong answer, and none for a wrong one."""
    model = RewardModel(config())
    answer = model.score(replace(episode(), padding=padding), RewardState())
    assert answer.total == pytest.approx(total)
    assert ("padding" in answer.parts) == (total < 1)
    wrong = replace(episode(correctness=0.0), padding=padding)
    assert model.score(wrong, RewardState()).total == 0.0
