"""The loop with the real chat format and the real engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine.chat.renderer import CallText, KimiRenderer
from engine.chat.tokenizers import ByteTokenizer
from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.runtime.types import StepRequest, StepResult
from engine.runtime.weights import make_weight_set
from parl.rollout.chat import ChatCall, Reply
from parl.rollout.episode import World, run_episode
from parl.rollout.group import run_group
from parl.rollout.jobs import GroupJob
from parl.rollout.kimi_chat import KimiChat
from parl.rollout.waits import Waits
from parl.trajectory import Trajectory
from reward_models.episode import Outcome
from tests.parl.rollout.test_episode import assert_same_tokens
from tests.parl.rollout.tiny import FAMILY, FAST, Boxes, TinyRuntime, add_task, make_job

TOKENIZER = ByteTokenizer(words=("functions.lookup:", "functions.calc:", "assistant"))
RENDERER = KimiRenderer(TOKENIZER, declare_tools="names")
CHAT = KimiChat(RENDERER)


def test_the_prompt_declares_the_tools_and_ends_with_the_header():
    """What the policy answers after."""
    ids = CHAT.prompt(add_task()).tolist()
    header = RENDERER.generation_header()
    assert ids[-len(header) :] == header and CHAT.stop_ids == (RENDERER.end_id,)
    text = TOKENIZER.decode(ids)
    assert "functions.lookup functions.calc" in text and add_task().instruction in text


def test_calls_are_read_from_ids_and_what_cannot_be_read_is_one_more_call():
    """The session, not the reader, decides what a malformed call costs."""
    call = CallText("functions.lookup:0", '{"key":"a"}')
    ids, _ = RENDERER.assistant_turn("hm", [call])
    reply = CHAT.read(np.array(ids, np.int32))
    assert reply == Reply("hm", (ChatCall("functions.lookup:0", call.name_text, '{"key":"a"}'),))
    broken = CHAT.read(np.array(ids[:-4], np.int32))
    assert broken.text == "hm" and broken.calls[-1].name_text == ""
    assert "functions.lookup:0" in broken.calls[-1].arguments_text


def test_an_episode_in_kimis_format_is_append_only():
    """Prompt, turns and answers concatenated are the rendered dialogue, token for token."""
    task = add_task()
    oracle = FAMILY.oracle(task)
    turns = [
        RENDERER.assistant_turn("", [CallText(c.name_text, c.arguments_text) for c in calls])[0]
        for calls in oracle.rounds
    ]
    turns.append(RENDERER.assistant_turn(oracle.final_text)[0])
    middle = RENDERER.generation_header()

    def policy(context, draw, version):
        starts = sum(
            context[i : i + len(middle)] == middle for i in range(len(context) - len(middle) + 1)
        )
        return turns[starts - 1]

    world = World(TinyRuntime(policy), Boxes(), CHAT, FAST, Waits("w0"))
    trajectory = asyncio.run(run_episode(make_job(task), world))
    assert (trajectory.outcome, trajectory.correctness) == (Outcome.COMPLETED, 1.0)
    expected = CHAT.prompt(task).tolist()
    for turn, calls in zip(turns, [*oracle.rounds, ()], strict=True):
        expected += turn
        for raw in calls:
            seen = trajectory.calls[int(raw.name_text[-1])].observation
            expected += RENDERER.observation(raw.name_text, seen)
        expected += RENDERER.generation_header() if calls else []
    assert trajectory.token_ids().tolist() == expected


def test_four_unreadable_turns_are_a_parse_failure():
    """Markers in the wrong order, four times."""
    ids = [TOKENIZER.special_id("<|tool_call_begin|>"), 65, RENDERER.end_id]
    world = World(TinyRuntime(lambda *_: ids), Boxes(), CHAT, FAST, Waits("w0"))
    trajectory = asyncio.run(run_episode(make_job(add_task()), world))
    assert (trajectory.outcome, len(trajectory.calls)) == (Outcome.PARSE_FAILURE, 4)
    first = TOKENIZER.decode(trajectory.turns[0].observation_ids.tolist())
    assert "unparsable" in first and "## Return of" not in first


# -- the real engine, with a policy that has learnt nothing ------------------------------------

MODEL = ModelConfig(vocab_size=320, hidden_size=48, num_hidden_layers=2, head_dim=12)
TENSORS = {k: v.detach().numpy().copy() for k, v in PolicyModel(MODEL, seed=1).state_dict().items()}


class Talkative(KimiChat):
    """Reads every turn of random tokens as a call whose key the first token decides."""

    stop_ids = tuple(range(0, 320, 16))

    def read(self, sampled_ids: np.ndarray) -> Reply:
        key = chr(97 + int(sampled_ids[0]) % 26)
        name = "functions.lookup:0"
        return Reply("", (ChatCall(name, name, f'{{"key":"{key}"}}'),))


class Mortal:
    """A LightEngine that is replaced by a fresh one before the n-th steps given."""

    def __init__(self, deaths: set[int]) -> None:
        self._deaths = deaths
        self._steps = 0
        self.engine = self._start()

    def _start(self) -> LightEngine:
        config = EngineConfig(max_context=256, num_blocks=256)
        weights = make_weight_set(0, TENSORS, {})
        return LightEngine(MODEL, config, fetch_weights=lambda version: weights)

    async def forward_step(self, request: StepRequest) -> StepResult:
        self._steps += 1
        if self._steps in self._deaths:
            self.engine.close()
            self.engine = self._start()
        return await self.engine.forward_step(request)

    def __getattr__(self, name: str):
        return getattr(self.engine, name)


def real_group(deaths: set[int], num_samples: int = 3) -> list[Trajectory]:
    engine = Mortal(deaths)
    boxes = Boxes()
    world = World(engine, boxes, Talkative(RENDERER), replace(FAST, max_rebuilds=6), Waits("w0"))
    limits = {"max_turns": 4, "max_tokens": 120, "max_tokens_per_turn": 40}
    jobs = tuple(make_job(add_task(), sample, **limits) for sample in range(num_samples))
    results = asyncio.run(run_group(GroupJob(jobs), world))
    info = asyncio.run(engine.engine.info())
    engine.engine.close()
    assert info.num_contexts == 0 and not boxes.open
    assert all(isinstance(result, Trajectory) for result in results)
    return results  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("deaths", [{2}, {1, 5}, {6, 7, 8}])
def test_a_real_engine_that_dies_costs_no_bit(deaths: set[int]):
    """Tokens, logprobs and experts of a whole group equal those of an undisturbed one."""
    calm = real_group(set())
    assert sum(len(t.turns) for t in calm) > 5, "the episodes have several turns"
    for trajectory in calm:
        trajectory.check()
        experts = trajectory.to_training_sample().experts
        assert experts is not None and experts.shape[1:] == (2, 2)
    for before, after in zip(calm, real_group(deaths), strict=True):
        assert_same_tokens(before, after)


def test_a_context_that_no_room_would_hold_is_not_waited_for():
    """Longer than max_context: others that give their room back would not help."""
    config = EngineConfig(max_context=16, num_blocks=256)
    weights = make_weight_set(0, TENSORS, {})
    engine = LightEngine(MODEL, config, fetch_weights=lambda version: weights)
    boxes = Boxes()
    world = World(engine, boxes, Talkative(RENDERER), FAST, Waits("w0"))

    async def played() -> Trajectory:
        return await asyncio.wait_for(run_episode(make_job(add_task()), world), 30)

    try:
        trajectory = asyncio.run(played())
    finally:
        engine.close()
    assert trajectory.outcome is Outcome.INFRA_ERROR and trajectory.correctness is None
    assert "exceed engine.max_context=16" in (trajectory.error or "")
    assert not boxes.open
