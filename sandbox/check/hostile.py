"""Answers that make a careless verifier run for ever or fall over: it must score them all."""

from __future__ import annotations

from dataclasses import replace

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.scripts import SHELL_ANSWER, Script
from sandbox.task import TaskSpec

MAX_VERDICT_S = 30.0
"""A verifier that is given longer is stopped here all the same."""
HOSTILE = {
    "forty digits and a letter": "1" * 40 + "x",
    "forty letters and a mark": "a" * 40 + "!",
    "words without an end": "a " * 40 + "!",
    "100,000 times one digit": "1" * 100_000,
    "brackets 20,000 deep": "[" * 20_000 + "]" * 20_000,
}


async def try_hostile(stage: Stage, spec: TaskSpec, oracle: Script, step: Step) -> int:
    """Episodes played: the oracle's world with each answer, until one has no verdict."""
    if oracle.final_text.strip() == SHELL_ANSWER:
        return 0  # files are judged
    limit = min(spec.verifier.timeout_s, MAX_VERDICT_S)
    spec = replace(spec, verifier=replace(spec.verifier, timeout_s=limit))
    for number, (what, text) in enumerate(HOSTILE.items(), start=1):
        played = await stage.play(spec, replace(oracle, name="oracle-hostile", final_text=text))
        if played.verdict.error is not None:
            step.add(
                "hostile-answer",
                f"tamper: answer of {what}",
                f"no verdict within {limit:g} s: {str(played.verdict.error)[:120]}; a policy that "
                "finds such an answer ends the episode without a reward: bound the length of what "
                "is judged, and use no pattern with a repeat inside a repeat",
                "warning",
            )
            return number
    return len(HOSTILE)
