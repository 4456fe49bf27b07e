"""Jobs and trajectories of any shape for the ledger's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.runtime.types import DrawKey
from parl.rollout.jobs import EpisodeJob
from parl.trajectory import ToolCallRecord, Trajectory, Turn
from reward_models.episode import UNSCORED, Outcome, RewardBreakdown
from sandbox.catalog.registry import get_family

TASK = get_family("lookup_calc").instance(1, 0, "train", "lookup")


def make_job(
    task_index: int = 0, sample: int = 0, round_index: int = 0, phase: str = "train", seed: int = 3
) -> EpisodeJob:
    return EpisodeJob(
        run_id="run-1",
        phase=phase,
        round=round_index,
        task_index=task_index,
        sample=sample,
        task=TASK,
        draw=DrawKey(seed, round_index, task_index, sample),
        weight_version=round_index,
    )


def make_trajectory(job: EpisodeJob, outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    """Two turns with one call between them, with experts."""
    experts = np.arange(7 * 2 * 2, dtype=np.int16).reshape(7, 2, 2)
    turns = [
        Turn(
            sampled_ids=np.array([5, 6], np.int32),
            logprobs=np.array([-0.1, -0.7], np.float32),
            loss_mask=np.array([1, 0], np.uint8),
            observation_ids=np.array([9], np.int32),
            weight_version=job.weight_version,
            finish="stop",
            experts=experts[:4],
        ),
        Turn(
            sampled_ids=np.array([7, 8], np.int32),
            logprobs=np.array([-0.2, -1e-30], np.float32),
            loss_mask=np.array([1, 1], np.uint8),
            observation_ids=np.zeros(0, np.int32),
            weight_version=job.weight_version,
            finish="stop",
            experts=experts[4:7],
            experts_start=4,
        ),
    ]
    call = ToolCallRecord(
        turn=0,
        index=0,
        name_text="functions.lookup:0",
        arguments_text='{"key":"a"}',
        tool="lookup",
        arguments={"key": "a"},
        observation="5",
        error=None,
        repairs=("key",),
        elapsed_s=0.01,
    )
    return Trajectory(
        episode_id=job.episode_id,
        task_name=job.task.name,
        task_type=job.task.task_type,
        draw=job.draw,
        prompt_ids=np.array([1, 2, 3], np.int32),
        turns=turns,
        calls=[call],
        outcome=outcome,
        correctness=None if outcome in UNSCORED else 1.0,
        final_text="5",
        budget_units=dict(job.task.budget_units),
        min_tokens=job.task.min_tokens,
        max_tokens=160,
        elapsed_s=0.5,
        verdict_reasons=("the number is right",),
        sandbox={"level": "A", "memory_bytes": 1 << 28, "cpus": None},
    )


def reward(total: float | None = 1.0) -> RewardBreakdown:
    parts = {} if total is None else {"correctness": total - 0.25, "budget": 0.25}
    return RewardBreakdown(total, parts, ("solved",), "parl-0")


def _array(dtype: type, length: int, **limits: int) -> st.SearchStrategy[np.ndarray]:
    if dtype is np.float32:
        # any bits at all: infinities, NaN payloads, negative zero
        return hnp.arrays(np.uint32, length).map(lambda bits: bits.view(np.float32))
    return hnp.arrays(dtype, length, elements=limits or None)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    n, m, p = (draw(st.integers(0, 5)) for _ in range(3))
    experts = None
    selections = None
    if draw(st.booleans()):
        experts = draw(hnp.arrays(np.int16, (p, draw(st.integers(1, 3)), 2)))
    if draw(st.booleans()):
        last = draw(st.sampled_from([300, 2**31 - 1]))
        places = st.integers(-1, last)
        selections = draw(hnp.arrays(np.int32, (p, 2, 1, 2, 3), elements=places))
    codes = None
    if draw(st.booleans()):
        codes = draw(hnp.arrays(np.uint8, (draw(st.integers(0, 2)), draw(st.integers(1, 9)))))
    return Turn(
        sampled_ids=draw(_array(np.int32, n)),
        logprobs=draw(_array(np.float32, n)),
        loss_mask=draw(_array(np.uint8, n)),
        observation_ids=draw(_array(np.int32, m)),
        weight_version=draw(st.integers(0, 1000)),
        finish=draw(st.sampled_from(["stop", "length"])),
        experts=experts,
        experts_start=draw(st.integers(0, 100)),
        selections=selections,
        codes=codes,
        codes_start=draw(st.integers(1, 100)),
        warm_reads=draw(st.integers(0, 10**6)),
        retrieved=draw(st.integers(0, 10**6)),
        media_refs=tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
    )


ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
"""Lone surrogates and NUL included: a policy that samples bytes writes them."""

CALLS = st.builds(
    ToolCallRecord,
    turn=st.just(0),
    index=st.just(0),
    name_text=ANY_TEXT,
    arguments_text=ANY_TEXT,
    tool=st.none() | st.just("lookup"),
    arguments=st.none() | st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)),
    observation=ANY_TEXT,
    error=st.none() | st.just("bad_json"),
    repairs=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    elapsed_s=st.floats(0, 10),
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    outcome = draw(st.sampled_from(Outcome))
    calls = draw(st.lists(CALLS, max_size=3))
    return Trajectory(
        episode_id="",
        task_name=TASK.name,
        task_type=TASK.task_type,
        draw=DrawKey(2**64 - 1, 2**32 - 1, 0, 0, 2**16 - 1),
        prompt_ids=draw(_array(np.int32, draw(st.integers(0, 5)))),
        turns=draw(st.lists(turns(), max_size=3)),
        calls=[replace(call, index=index) for index, call in enumerate(calls)],
        outcome=outcome,
        correctness=None if outcome in UNSCORED else draw(st.floats(0, 1)),
        final_text=draw(ANY_TEXT),
        error=draw(st.none() | ANY_TEXT),
        budget_units=draw(st.dictionaries(st.text(max_size=5), st.floats(0, 1e9), max_size=2)),
        min_tokens=draw(st.none() | st.integers(0, 1000)),
        max_tokens=draw(st.none() | st.integers(0, 1000)),
        elapsed_s=draw(st.floats(0, 100)),
        verdict_reasons=tuple(draw(st.lists(ANY_TEXT, max_size=2))),
        sandbox=draw(st.sampled_from([{}, {"level": "C", "memory_bytes": None, "uid": 7}])),
    )


def same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Equal dtype, shape and bytes; NaN payloads count."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_trajectory(a: Trajectory, b: Trajectory) -> None:
    """Every field equal, arrays bit for bit."""
    arrays = (
        *("sampled_ids", "logprobs", "loss_mask", "observation_ids"),
        *("experts", "selections", "codes"),
    )
    plain = (
        *("weight_version", "finish", "experts_start", "media_refs", "warm_reads", "retrieved"),
        "codes_start",
    )
    assert same_bits(a.prompt_ids, b.prompt_ids)
    assert len(a.turns) == len(b.turns)
    for left, right in zip(a.turns, b.turns, strict=True):
        assert all(same_bits(getattr(left, name), getattr(right, name)) for name in arrays)
        assert all(getattr(left, name) == getattr(right, name) for name in plain)
    for name in Trajectory.__dataclass_fields__:
        if name not in ("prompt_ids", "turns"):
            assert getattr(a, name) == getattr(b, name), name
