"""Independent changes in another order: where the instruction asks for none, it may not matter."""

from __future__ import annotations

import re
from dataclasses import replace

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.partial import writes
from sandbox.check.scripts import Script, has_shell
from sandbox.task import TaskSpec

_ORDER = re.compile(
    r"(?i)(?<!due )\bbefore\b(?! (?:to(?:day|morrow)|now|noon|midnight|the \d|\d|[A-Z][a-z]+day))"
    r"|\bafter\b(?! (?:to(?:day|morrow)|now|noon|midnight|the \d|\d))"
    r"|\b(?:first|firstly|then|next|finally|lastly|afterwards?|sequence|successively|in turn"
    r"|subsequently|one by one|once|step by step|ascending|descending|sorted)\b"
    r"|\border(?:ed)?\b(?!\s+\S*\d)|先|再|然后|顺序|依次|最后|接着|之前|之后"
    r"|(?m:^\s*\d+[.)]\s)"
)
"""Words of an instruction that set an order. "Due before today" and "the order o-7" do not."""


def reordered(spec: TaskSpec, oracle: Script) -> list[Script]:
    """The solution with the changes of each parallel round in reverse, and with its changes by one
    tool in reverse where they are made to different things."""
    made = writes(spec, oracle)
    found = []
    rounds = [list(calls) for calls in oracle.rounds]
    for turn in range(len(rounds)):
        places = [place for at, place, _, _ in made if at == turn]
        for place, other in zip(places, reversed(places), strict=True):
            rounds[turn][place] = oracle.rounds[turn][other]
    found.append(replace(oracle, name="oracle-reordered", rounds=tuple(map(tuple, rounds))))
    rounds = [list(calls) for calls in oracle.rounds]
    for tool in dict.fromkeys(name for _, _, name, _ in made):
        mine = [entry for entry in made if entry[2] == tool]
        keys = set.intersection(*(set(arguments) for _, _, _, arguments in mine))
        if any(len({str(entry[3][key]) for entry in mine}) == len(mine) for key in keys):
            for (turn, place, _, _), (at, other, _, _) in zip(mine, reversed(mine), strict=True):
                rounds[turn][place] = oracle.rounds[at][other]
    found.append(replace(oracle, name="oracle-reordered", rounds=tuple(map(tuple, rounds))))
    different = [script for script in found if script.rounds != oracle.rounds]
    return different[:1] if len({script.rounds for script in different}) == 1 else different


async def try_orders(stage: Stage, spec: TaskSpec, oracle: Script, step: Step) -> int:
    """Episodes played; ``spec`` and ``stage`` are those of the probe bundle."""
    if has_shell(spec) or _ORDER.search(spec.instruction):
        return 0
    scripts = reordered(spec, oracle)
    for number, script in enumerate(scripts, start=1):
        played = await stage.play(spec, script)
        if played.errors or played.stop is not None or played.passed:
            continue  # refused: the changes are not independent
        if played.verdict.error is None:
            step.add(
                "unannounced-order",
                "tamper: oracle-reordered",
                f"the solution's own changes in another order score {played.verdict.correctness:g} "
                f"({'; '.join(played.verdict.reasons)[:80]}), and the instruction asks for no "
                "order; say it there, or judge without it",
                "warning",
            )
            return number
    return len(scripts)
