"""One episode: how it goes on, how it ends, and what faults leave behind (nothing)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parl.rollout.episode import run_episode
from parl.trajectory import Trajectory
from reward_models.episode import Outcome
from tests.parl.rollout.tiny import (
    FAMILY,
    FAST,
    Boxes,
    LineChat,
    add_task,
    lookup_task,
    make_job,
    make_world,
    oracle_policy,
    script,
    to_text,
)
from tests.parl.store.builders import same_bits

QUICK = settings(max_examples=25, deadline=None)
LOOKUP = '?functions.lookup:0 {"key":"%s"}'


def run(world, job) -> Trajectory:
    return asyncio.run(run_episode(job, world))


def undisturbed(task) -> Trajectory:
    world, _, _ = make_world(oracle_policy(task))
    return run(world, make_job(task))


def assert_same_tokens(a: Trajectory, b: Trajectory) -> None:
    assert same_bits(a.token_ids(), b.token_ids())
    for left, right in zip(a.turns, b.turns, strict=True):
        assert same_bits(left.logprobs, right.logprobs)
        assert same_bits(left.experts, right.experts)
        assert left.experts_start == right.experts_start
        assert same_bits(left.codes, right.codes) and left.codes_start == right.codes_start
    assert (a.outcome, a.correctness, a.final_text) == (b.outcome, b.correctness, b.final_text)


def test_a_solved_episode_is_recorded_as_the_engine_saw_it():
    """Calls, observations, verdict; the ledger's tokens are the engine's context."""
    task = add_task()
    world, runtime, boxes = make_world(oracle_policy(task))
    trajectory = run(world, make_job(task))
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.correctness == 1.0
    assert trajectory.final_text == FAMILY.oracle(task).final_text
    assert [call.tool for call in trajectory.calls] == ["lookup", "lookup", "calc"]
    assert [call.turn for call in trajectory.calls] == [0, 1, 2]
    assert trajectory.verdict_reasons == ("exact",)
    assert runtime.released == [trajectory.token_ids().tolist()]
    assert not runtime.contexts and not boxes.open
    assert boxes.owners == ["run-1/train/00000/00000/000"]
    sample = trajectory.to_training_sample()
    assert sample.experts is not None and len(sample.experts) == len(sample.token_ids) - 1
    assert np.array_equal(sample.experts[:, 0, 0], np.arange(len(sample.token_ids) - 1))
    assert sample.loss_mask.sum() == trajectory.num_sampled
    assert sample.codes is not None and len(sample.codes) == (len(sample.token_ids) - 1) // 8 - 2
    assert np.array_equal(sample.codes.ravel(), sample.token_ids[8:][: sample.codes.size])


def test_several_calls_in_a_turn_are_answered_in_order():
    """One observation each, then the next turn."""
    task = add_task()
    keys = [raw.arguments_text for (raw,) in FAMILY.oracle(task).rounds[:2]]
    turn = f"?functions.lookup:0 {keys[0]}|?functions.lookup:1 {keys[1]}"
    world, _, _ = make_world(script(turn, turn, "done"))
    trajectory = run(world, make_job(task))
    values = [call.observation for call in trajectory.calls]
    assert [(call.turn, call.index) for call in trajectory.calls] == [(0, 0), (0, 1)]
    assert to_text(trajectory.turns[0].observation_ids) == f">{values[0]}\n>{values[1]}\n"
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.correctness == 0.0


@pytest.mark.parametrize(
    ("limits", "outcome", "num_turns"),
    [
        ({"max_turns": 2}, Outcome.TURN_LIMIT, 2),
        ({"max_tokens_per_turn": 10}, Outcome.TOKEN_BUDGET, 1),
        ({"max_tokens": 45}, Outcome.TOKEN_BUDGET, 2),
    ],
)
def test_limits_end_an_episode_with_correctness_zero(limits, outcome, num_turns):
    """Turns, tokens of a turn, tokens of the episode."""
    task = add_task()
    world, runtime, boxes = make_world(oracle_policy(task))
    trajectory = run(world, make_job(task, **limits))
    assert (trajectory.outcome, trajectory.correctness) == (outcome, 0.0)
    assert len(trajectory.turns) == num_turns
    assert trajectory.num_sampled <= limits.get("max_tokens", 400)
    assert not runtime.contexts and not boxes.open


@pytest.mark.parametrize(
    ("turn", "outcome"),
    [
        ("xy" * 20, Outcome.LOOP),
        ("let me see: " + "a" * 28, Outcome.LOOP),
        ("xy" * 15 + "z" * 7, Outcome.TOKEN_BUDGET),  # seven times is no loop yet
        ("```\n" + "0 " * 30, Outcome.TOKEN_BUDGET),  # a table in a code fence
    ],
)
def test_a_turn_that_repeats_itself_until_it_is_cut_is_a_loop(turn: str, outcome: Outcome):
    """A violation, not a mere lack of room."""
    world, _, _ = make_world(script(turn))
    trajectory = run(world, make_job(add_task(), max_tokens_per_turn=37))
    assert (trajectory.outcome, trajectory.correctness) == (outcome, 0.0)


def test_the_limits_of_the_box_are_on_record():
    """As the box says them, not as the config asked for them."""
    world, _, boxes = make_world(oracle_policy(add_task()))
    boxes.enforced = {"level": "none", "memory_bytes": None}
    assert run(world, make_job(add_task())).sandbox == {"level": "none", "memory_bytes": None}


def test_a_budget_that_is_used_up_exactly_ends_the_episode():
    """No step is asked for zero tokens."""
    task = add_task()
    first = len(undisturbed(task).turns[0].sampled_ids)
    world, _, _ = make_world(oracle_policy(task))
    trajectory = run(world, make_job(task, max_tokens=first))
    assert trajectory.outcome is Outcome.TOKEN_BUDGET and len(trajectory.turns) == 1
    assert len(trajectory.to_training_sample().token_ids) == len(trajectory.prompt_ids) + first


def test_the_engines_context_limit_is_a_token_budget():
    """An episode that fills the context is the policy's doing."""
    task = add_task()
    world, _, _ = make_world(oracle_policy(task), settings=replace(FAST, max_context=60))
    trajectory = run(world, make_job(task))
    assert trajectory.outcome is Outcome.TOKEN_BUDGET
    assert len(trajectory.to_training_sample().token_ids) <= 60


@pytest.mark.parametrize(
    ("turn", "outcome", "num_calls"),
    [
        ("?functions.fly:0 {}", Outcome.ILLEGAL_CALL, 2),
        ("?!<|tool_call_begin|>functions.look", Outcome.PARSE_FAILURE, 4),
        (LOOKUP % "a", Outcome.LOOP, 5),
    ],
)
def test_violations_end_an_episode_by_the_sessions_word(turn, outcome, num_calls):
    """Unknown tool twice, unreadable call four times, the same call with the same result."""
    world, _, boxes = make_world(script(turn))
    trajectory = run(world, make_job(lookup_task()))
    assert (trajectory.outcome, trajectory.correctness) == (outcome, 0.0)
    assert len(trajectory.calls) == num_calls
    assert len(trajectory.turns[-1].observation_ids) == 0, "the engine never saw the last answer"
    assert not boxes.open


def test_a_verifier_without_a_verdict_gives_no_correctness():
    """Verifier error is nobody's reward."""
    task = lookup_task()
    world, _, _ = make_world(oracle_policy(task), Boxes(no_verdict=True))
    trajectory = run(world, make_job(task))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.VERIFIER_ERROR, None)
    assert trajectory.error == "verifier: crash (ValueError)"


@QUICK
@given(st.sets(st.integers(1, 14), max_size=2))
def test_a_dying_engine_costs_no_token(deaths):
    """Whichever engine calls find their context gone, the rebuilt episode is bit for bit the
    same, expert reports included."""
    task = add_task()
    world, runtime, boxes = make_world(oracle_policy(task), faults=dict.fromkeys(deaths, "die"))
    trajectory = run(world, make_job(task))
    assert_same_tokens(trajectory, undisturbed(task))
    assert boxes.num_opened == 1, "the sandbox went on living"
    assert not runtime.contexts and not boxes.open


def test_an_engine_that_comes_back_with_other_weights_restarts_the_episode():
    """The first part of an episode must not be sampled by one policy and the rest by another."""
    task = add_task()
    world, runtime, boxes = make_world(
        oracle_policy(task), faults={4: "die"}, version_after_death=1
    )
    trajectory = run(world, make_job(task))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.INFRA_ERROR, None)
    assert trajectory.error is not None and "serves weight version 1" in trajectory.error
    assert "attempt 3" in trajectory.error and boxes.num_opened == 3
    assert not runtime.contexts and not boxes.open


@QUICK
@given(st.integers(1, 8))
def test_a_dying_sandbox_restarts_the_episode_with_the_same_draws(request_number):
    """In start, any call or the verifier: the second attempt samples the same tokens."""
    task = add_task()
    world, runtime, boxes = make_world(oracle_policy(task), Boxes({request_number: "lost"}))
    trajectory = run(world, make_job(task))
    assert_same_tokens(trajectory, undisturbed(task))
    assert boxes.num_opened == (2 if request_number <= 5 else 1)
    assert not runtime.contexts and not boxes.open


def test_a_sandbox_that_always_dies_is_an_infrastructure_error():
    """Attempts are bounded; the cause is on record; there is no correctness."""
    task = lookup_task()
    world, runtime, boxes = make_world(oracle_policy(task), Boxes({-1: "lost"}))
    trajectory = run(world, make_job(task))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.INFRA_ERROR, None)
    assert trajectory.error == "attempt 3: SandboxLost: box died in start"
    assert boxes.num_opened == 3 and not runtime.contexts and not boxes.open


def test_an_unexpected_error_is_recorded_and_not_retried():
    """A bug of ours would only come back."""
    task = lookup_task()
    world, runtime, boxes = make_world(oracle_policy(task), faults={2: "bug"})
    trajectory = run(world, make_job(task))
    assert (trajectory.outcome, trajectory.error) == (Outcome.INFRA_ERROR, "KeyError: 'bug'")
    assert boxes.num_opened == 1 and not runtime.contexts and not boxes.open


def test_a_full_engine_is_tried_again():
    """CapacityError is about others' contexts, not about this policy."""
    task = lookup_task()
    world, _, boxes = make_world(oracle_policy(task), faults={2: "full"})
    assert_same_tokens(run(world, make_job(task)), undisturbed(task))
    assert boxes.num_opened == 2


def test_an_engine_without_room_is_waited_for():
    """Opening a context is patient, since others give theirs back; nothing restarts."""
    task = lookup_task()
    world, _, boxes = make_world(oracle_policy(task), faults=dict.fromkeys(range(1, 6), "full"))
    assert_same_tokens(run(world, make_job(task)), undisturbed(task))
    assert boxes.num_opened == 1


def test_a_hanging_engine_is_an_infrastructure_error_that_names_the_wait():
    """Not the agent's timeout: it did nothing wrong."""
    task = lookup_task()
    patient = replace(FAST, step_timeout_s=0.02, max_attempts=1)
    world, runtime, boxes = make_world(oracle_policy(task), settings=patient, faults={2: "hang"})
    trajectory = run(world, make_job(task))
    assert trajectory.outcome is Outcome.INFRA_ERROR
    assert trajectory.error is not None
    assert "waited 0.0 s for engine.forward_step" in trajectory.error
    assert not runtime.contexts and not boxes.open and not world.waits.snapshot()


def test_a_tool_that_outlives_the_episode_is_the_agents_timeout():
    """It asked for the call; what it did so far is scored as not solved."""
    task = lookup_task()
    world, _, boxes = make_world(oracle_policy(task), Boxes({2: "hang"}))
    trajectory = run(world, make_job(task, deadline_s=0.2))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.AGENT_TIMEOUT, 0.0)
    assert len(trajectory.turns) == 1 and not boxes.open


def test_a_hanging_verifier_is_a_verifier_error():
    """The agent's clock has stopped by then."""
    task = lookup_task()
    patient = replace(FAST, verify_timeout_s=0.02)
    world, _, boxes = make_world(oracle_policy(task), Boxes({3: "hang"}), patient)
    trajectory = run(world, make_job(task))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.VERIFIER_ERROR, None)
    assert trajectory.turns and not boxes.open


@QUICK
@given(st.integers(0, 60))
def test_a_cancelled_episode_gives_everything_back(num_steps):
    """Wherever the cancel strikes, clean-up included, and the cancel itself gets through."""
    task = add_task()

    async def body():
        world, runtime, boxes = make_world(oracle_policy(task))
        running = asyncio.create_task(run_episode(make_job(task), world))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        if running.cancel():
            with pytest.raises(asyncio.CancelledError):
                await running
        assert not runtime.contexts and not boxes.open and not world.waits.snapshot()

    asyncio.run(body())


def test_a_prompt_that_cannot_be_rendered_is_an_infrastructure_error():
    """The renderer's fault, recorded on the episode."""

    class Broken(LineChat):
        def prompt(self, task):
            raise ValueError("no template")

    world, _, _ = make_world(script("1"))
    trajectory = run(replace(world, chat=Broken()), make_job(lookup_task()))
    assert (trajectory.outcome, trajectory.error) == (
        Outcome.INFRA_ERROR,
        "ValueError: no template",
    )
