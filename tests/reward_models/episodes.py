"""Episodes and configs for reward tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from reward_models.config import RewardConfig
from reward_models.episode import Episode, Outcome
from reward_models.gate import GateState
from reward_models.state import RewardState, TypeState

MINIMUM, REFERENCE = 100.0, 1000.0


def episode(
    *,
    correctness: float | None = 1.0,
    tokens: int = 200,
    outcome: Outcome = Outcome.COMPLETED,
    task_type: str = "add",
    units: dict[str, float] | None = None,
    min_tokens: int | None = None,
    repairs: int = 0,
) -> Episode:
    return Episode(
        episode_id="e",
        task_name=f"{task_type}/1",
        task_type=task_type,
        outcome=outcome,
        correctness=correctness,
        num_tokens=tokens,
        num_turns=1,
        num_calls=1,
        num_repairs=repairs,
        budget_units={} if units is None else units,
        min_tokens=min_tokens,
    )


def config(**sections: Any) -> RewardConfig:
    return RewardConfig.model_validate(sections)


def open_state(stage: int, **known: Any) -> RewardState:
    """A state whose type ``add`` is gated open, with m = 100 and L_ref = 1000 unless told."""
    values: dict[str, Any] = {"minimum": MINIMUM, "reference": REFERENCE, **known}
    return RewardState(stage=stage, types={"add": TypeState(gate=GateState(True, ()), **values)})


SCORED = [Outcome.COMPLETED, Outcome.AGENT_TIMEOUT, Outcome.TOKEN_BUDGET, Outcome.TURN_LIMIT]
BROKEN = [Outcome.LOOP, Outcome.ILLEGAL_CALL, Outcome.PARSE_FAILURE]
OURS = [
    Outcome.ENV_ERROR,
    Outcome.VERIFIER_ERROR,
    Outcome.INFRA_ERROR,
    Outcome.CANCELLED,
]


@st.composite
def episodes(draw: st.DrawFn, task_types: tuple[str, ...] = ("add", "lookup")) -> Episode:
    """Any episode the rollout can hand over."""
    outcome = draw(st.sampled_from(list(Outcome)))
    graded = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, allow_subnormal=False))
    return episode(
        correctness=None if outcome in OURS else draw(graded),
        tokens=draw(st.integers(0, 3000)),
        outcome=outcome,
        task_type=draw(st.sampled_from(task_types)),
        repairs=draw(st.sampled_from([0, 0, 1, 7, 40])),
        units=draw(st.sampled_from([{}, {"calls": 3.0}, {"calls": 0.0}, {"unknown": 2.0}])),
        min_tokens=draw(st.none() | st.integers(1, 300)),
    )
