"""Do tools change the world that say they only read it? By name, and by playing the reads."""

from __future__ import annotations

from sandbox.calls.decode import decode
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError
from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.lint_manifest import CHANGES
from sandbox.check.probe import STATE_KEY
from sandbox.check.scripts import NOP, Script
from sandbox.check.subject import Case
from sandbox.task import TaskSpec


async def run_effects(stage: Stage, spec: TaskSpec, case: Case) -> Step:
    """``spec`` and ``stage`` are those of the probe bundle."""
    step = Step("effects")
    for tool in case.spec.tools:
        if tool.effect == "read" and CHANGES.match(tool.name):
            step.add(
                "effect-mislabeled",
                f"tool {tool.name}",
                "is a read, but its name says that it changes something; a read is repaired and "
                "repeated freely, so declare effect write or destructive",
            )
    table = ToolTable(case.spec.tools, case.spec.forbidden_tools)
    reads = []
    for calls in case.oracle.rounds:
        for call in calls:
            decoded = decode(call, table)
            if not isinstance(decoded, CallError) and table[decoded.tool].effect == "read":
                reads.append((call,))
    if not reads:
        step.note = "the oracle reads nothing"
        return step
    before = (await stage.play(spec, NOP)).verdict.details.get(STATE_KEY)
    after = (await stage.play(spec, Script("reads", tuple(reads)))).verdict.details.get(STATE_KEY)
    if before is not None and after is not None and before != after:
        step.add(
            "effect-mislabeled",
            "tools/",
            "the oracle's reads alone change the end state; a tool that changes the world must not "
            "be declared a read",
        )
    step.note = f"{len(reads)} reads played"
    return step
