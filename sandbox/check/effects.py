"""Do tools do what they say, and no more? By name, by playing them, by arguments that lead out."""

from __future__ import annotations

from sandbox.check.episodes import Stage
from sandbox.check.escapes import run_escapes
from sandbox.check.findings import Step
from sandbox.check.lint_manifest import CHANGES
from sandbox.check.reads import run_reads, run_writes
from sandbox.check.subject import Case
from sandbox.check.written import Written
from sandbox.task import TaskSpec


async def run_effects(stage: Stage, spec: TaskSpec, case: Case, written: Written) -> Step:
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
    await run_reads(stage, spec, case, written.texts, step)
    await run_writes(stage, spec, case, written.texts, step)
    await run_escapes(stage, spec, case, written.texts, step)
    return step
