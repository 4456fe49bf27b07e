"""Demonstrations for the warm start: the oracle's calls, written cleanly or sloppily.

A plan is what an agent does: turns of text and calls, then an answer. ``sloppy`` spoils a plan the
way a weak model would: thinks aloud before calls, asks again for what it knows, answers before it
knows. The tools' answers come from a real session, never from the plan.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.chat.renderer import CallText, KimiRenderer
from parl.trajectory import TrainingSample
from sandbox.session import RawCall, Session

FILLERS = (
    "let me look. ",
    "i should ask for it. ",
    "ok, next one. ",
    "one more time. ",
    "now i need this. ",
)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One assistant turn that calls tools."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """(tool name, arguments JSON) in order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Turns with calls, then the answer; ``answer_text`` may think aloud before ``answer``."""

    turns: tuple[PlannedTurn, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Sloppiness:
    """Probabilities in [0, 1] of each bad habit."""

    filler: float
    redundant: float
    guess: float


def sloppy(plan: Plan, habits: Sloppiness, rng: random.Random) -> Plan:
    """``plan`` with each habit drawn by ``rng``; a guess cuts the plan and answers 1-9."""
    turns = list(plan.turns)
    answer = plan.answer
    if turns and rng.random() < habits.guess:
        turns = turns[: rng.randrange(len(turns))]
        answer = str(rng.randint(1, 9))
    spoiled: list[PlannedTurn] = []
    for position, turn in enumerate(turns):
        spoiled.append(_aloud(turn, habits, rng))
        if rng.random() < habits.redundant:
            again = turns[rng.randrange(position + 1)]
            spoiled.append(_aloud(replace(again, text=""), habits, rng))
    return Plan(tuple(spoiled), answer)


def _aloud(turn: PlannedTurn, habits: Sloppiness, rng: random.Random) -> PlannedTurn:
    if rng.random() >= habits.filler:
        return turn
    return replace(turn, text=rng.choice(FILLERS))


async def transcribe(
    plan: Plan, session: Session, renderer: KimiRenderer, prompt_ids: Sequence[int], index: int
) -> TrainingSample:
    """Play ``plan`` in ``session`` and write it as one training sample with exact loss spans.

    Trained on: the assistant's text, calls and end markers; never headers or observations.
    """
    ids = list(prompt_ids)
    mask = [0] * len(ids)
    counter = 0

    def assistant(text: str, calls: Sequence[CallText]) -> None:
        turn_ids, spans = renderer.assistant_turn(text, calls)
        bits = [0] * len(turn_ids)
        for start, end in spans:
            bits[start:end] = [1] * (end - start)
        ids.extend(turn_ids)
        mask.extend(bits)

    await session.start()
    for turn in plan.turns:
        calls = []
        for name, arguments in turn.calls:
            calls.append(CallText(renderer.call_id(name, counter), arguments))
            counter += 1
        assistant(turn.text, calls)
        for call in calls:
            seen = await session.call(RawCall(call.name_text, call.arguments_text))
            observed = renderer.observation(call.name_text, seen.text)
            ids.extend(observed)
            mask.extend([0] * len(observed))
        header = renderer.generation_header()
        ids.extend(header)
        mask.extend([0] * len(header))
    assistant(plan.answer, [])
    await session.close()
    return TrainingSample(
        key=(0, index, 0),
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.zeros(len(ids), np.float32),
        experts=None,
        weight_version=-1,
    )
