"""Demonstrations: exact loss spans, the very ids of a rollout, sloppiness by seed."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.base import CallText, Message
from engine.chat.renderer import KimiRenderer
from engine.chat.tokenizers import ByteTokenizer
from parl.rollout.episode import World, run_episode
from parl.rollout.kimi_chat import KimiChat
from parl.rollout.waits import Waits
from parl.sft.transcripts import FILLERS, Plan, PlannedTurn, Sloppiness, sloppy, transcribe
from parl.trajectory import TrainingSample, Trajectory
from reward_models.episode import Outcome
from sandbox.fakes import InProcessSession
from tests.parl.rollout.tiny import (
    FAMILY,
    FAST,
    Boxes,
    TinyRuntime,
    add_task,
    lookup_task,
    make_job,
)

TOKENIZER = ByteTokenizer(words=("functions.lookup:", "functions.calc:", "assistant", '{"key":"'))
RENDERER = KimiRenderer(TOKENIZER, declare_tools="names")
CHAT = KimiChat(RENDERER)
NEAT = Sloppiness(filler=0.0, redundant=0.0, guess=0.0)
PROBABILITY = st.floats(0, 1)


def oracle_plan(task) -> Plan:
    oracle = FAMILY.oracle(task)
    turns = tuple(
        PlannedTurn(
            "",
            tuple(
                (c.name_text.removeprefix("functions.").split(":")[0], c.arguments_text)
                for c in calls
            ),
        )
        for calls in oracle.rounds
    )
    return Plan(turns, oracle.final_text)


def write(task, plan: Plan) -> TrainingSample:
    session = InProcessSession(task, FAMILY.bundle)
    prompt = CHAT.prompt(task).tolist()
    return asyncio.run(transcribe(plan, session, RENDERER, prompt, 5))


def roll_out(task, plan: Plan) -> Trajectory:
    """A policy that samples the plan's turns, in the real agent loop."""
    turns, counter = [], 0
    for turn in plan.turns:
        calls = []
        for name, arguments in turn.calls:
            calls.append(CallText(RENDERER.call_id(name, counter), arguments))
            counter += 1
        turns.append(RENDERER.assistant_turn(turn.text, calls)[0])
    turns.append(RENDERER.assistant_turn(plan.answer)[0])
    header = RENDERER.generation_header()

    def policy(context, draw, version):
        starts = range(len(context) - len(header) + 1)
        return turns[sum(context[i : i + len(header)] == header for i in starts) - 1]

    world = World(TinyRuntime(policy), Boxes(), CHAT, FAST, Waits("w0"))
    job = make_job(task, max_turns=20, max_tokens=4000, max_tokens_per_turn=400)
    return asyncio.run(run_episode(job, world))


HABITS = {
    "clean": NEAT,
    "aloud": Sloppiness(filler=1.0, redundant=0.0, guess=0.0),
    "twice": Sloppiness(filler=0.5, redundant=1.0, guess=0.0),
    "guess": Sloppiness(filler=0.0, redundant=0.0, guess=1.0),
}


@pytest.mark.parametrize("habits", HABITS.values(), ids=HABITS)
@pytest.mark.parametrize("make_task", [lookup_task, add_task])
def test_a_transcript_is_what_a_rollout_of_the_same_turns_puts_into_the_context(make_task, habits):
    """Token for token and bit for bit of the mask: the policy never meets another format."""
    task = make_task()
    plan = sloppy(oracle_plan(task), habits, random.Random(3))
    sample, trajectory = write(task, plan), roll_out(task, plan)
    assert trajectory.outcome is Outcome.COMPLETED
    rolled = trajectory.to_training_sample()
    assert sample.token_ids.tolist() == rolled.token_ids.tolist()
    assert sample.loss_mask.tolist() == rolled.loss_mask.tolist()


@pytest.mark.parametrize("make_task", [lookup_task, add_task])
def test_a_clean_transcript_solves_its_task(make_task):
    """The oracle's calls, heard by the real tools, end in the right number."""
    trajectory = roll_out(make_task(), oracle_plan(make_task()))
    assert trajectory.correctness == 1.0 and not any(call.error for call in trajectory.calls)


def test_exactly_the_assistants_words_are_trained_on():
    """Text, calls and end markers; no prompt, header or observation."""
    task = add_task()
    plan = sloppy(oracle_plan(task), HABITS["aloud"], random.Random(1))
    sample = write(task, plan)
    messages, counter = [Message("user", task.instruction)], 0
    trajectory = roll_out(task, plan)
    for turn in plan.turns:
        calls = []
        for name, arguments in turn.calls:
            calls.append(CallText(RENDERER.call_id(name, counter), arguments))
            counter += 1
        messages.append(Message("assistant", turn.text, tuple(calls)))
        for call in calls:
            seen = trajectory.calls[counter - 1].observation
            messages.append(Message("tool", seen, call_id=call.name_text))
    messages.append(Message("assistant", plan.answer))
    tools = CHAT.prompt(task).tolist()
    ids, spans = RENDERER.transcript(messages)
    declared = len(sample.token_ids) - len(ids)  # the declarations come first
    assert sample.token_ids.tolist() == tools[:declared] + ids
    expected = np.zeros(len(ids), np.uint8)
    for start, end in spans:
        expected[start:end] = 1
    assert sample.loss_mask.tolist() == [0] * declared + expected.tolist()
    assert len(spans) == len(plan.turns) + 1
    assert all(ids[end - 1] == RENDERER.end_id for _, end in spans)
    trained = TOKENIZER.decode(sample.token_ids[sample.loss_mask == 1].tolist())
    assert all(turn.text in trained for turn in plan.turns) and "Return of" not in trained


def test_a_transcript_is_a_complete_training_sample():
    """Shapes and types of what the learner takes; nothing was sampled, so no experts."""
    sample = write(lookup_task(), oracle_plan(lookup_task()))
    n = len(sample.token_ids)
    assert sample.key == (0, 5, 0) and sample.experts is None and sample.weight_version == -1
    assert sample.token_ids.dtype == np.int32 and sample.loss_mask.dtype == np.uint8
    assert sample.logprobs.dtype == np.float32 and not sample.logprobs.any()
    assert len(sample.loss_mask) == len(sample.logprobs) == n
    prompt = len(CHAT.prompt(lookup_task()))
    assert not sample.loss_mask[:prompt].any() and sample.loss_mask[prompt] == 1


@given(PROBABILITY, PROBABILITY, PROBABILITY, st.integers(0, 10**6))
def test_the_same_rng_spoils_a_plan_the_same_way(filler, redundant, guess, seed):
    """A pure function of plan, habits and rng; it never invents a call."""
    plan = oracle_plan(add_task())
    habits = Sloppiness(filler, redundant, guess)
    spoiled = sloppy(plan, habits, random.Random(seed))
    assert spoiled == sloppy(plan, habits, random.Random(seed))
    known = {turn.calls for turn in plan.turns}
    assert all(turn.calls in known for turn in spoiled.turns)
    assert all(turn.text in ("", *FILLERS) for turn in spoiled.turns)
    first_seen = list(dict.fromkeys(turn.calls for turn in spoiled.turns))
    assert first_seen == [turn.calls for turn in plan.turns][: len(first_seen)]


@given(st.integers(0, 10**6))
def test_each_habit_alone(seed: int):
    """0 = never, 1 = always; a guess comes before the last call and is a digit from 1."""
    plan = oracle_plan(add_task())
    rng = random.Random(seed)
    assert sloppy(plan, NEAT, rng) == plan
    aloud = sloppy(plan, HABITS["aloud"], rng)
    assert all(turn.text in FILLERS for turn in aloud.turns)
    assert [turn.calls for turn in aloud.turns] == [turn.calls for turn in plan.turns]
    twice = sloppy(plan, Sloppiness(0.0, 1.0, 0.0), rng)
    assert len(twice.turns) == 2 * len(plan.turns) and twice.answer == plan.answer
    assert twice.turns[::2] == plan.turns
    guess = sloppy(plan, HABITS["guess"], rng)
    assert guess.turns == plan.turns[: len(guess.turns)] and len(guess.turns) < len(plan.turns)
    assert guess.answer in set("123456789")


def test_a_plan_without_calls_cannot_be_cut_shorter():
    """Nothing to spoil."""
    plan = Plan((), "7")
    assert sloppy(plan, Sloppiness(1.0, 1.0, 1.0), random.Random(0)) == plan
