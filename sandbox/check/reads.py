"""Every read of a task, also those that the solution never makes, inside the box.

The calls run in the task's own process (no session, so no loop detector ends them) and the end
state is compared after each: a read changes nothing, and one that is declared idempotent answers
the same each time. Whether an answer is *true* is known only where the solution relies on it.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from sandbox.calls.decode import decode
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError
from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.probe import SWEEP_TOOL
from sandbox.check.scripts import Script, has_shell
from sandbox.check.subject import Case
from sandbox.check.values import argument_sets
from sandbox.session import RawCall
from sandbox.shell.world import BUNDLE_NAME
from sandbox.task import TaskSpec

SWEEP_S = 8.0
"""Seconds of all calls with other arguments, and again of the repeated ones."""
MAX_WRITES = 8
MIN_VALUES = 4
"""Values of an argument that must all give the same answer before it counts as ignored."""
_OPEN_FILES = re.compile(r"(?i)too many open files|unable to open database|errno 24|EMFILE")
_LEFT_OPEN = "; it seems to leave files or connections open, which run out: close them in each call"
REPEATS = 1000
"""How often a read of the solution is repeated, if SWEEP_S allows: one failure in 300 then shows
with 96 %."""


def decoded_calls(case: Case) -> list[tuple[str, dict[str, Any]]]:
    """(tool, arguments) of the solution's calls; one that cannot be decoded fails in the step
    "oracle", so it is left out here."""
    table = ToolTable(case.spec.tools, case.spec.forbidden_tools)
    found = []
    for calls in case.oracle.rounds:
        for call in calls:
            decoded = decode(call, table)
            if not isinstance(decoded, CallError):
                found.append((decoded.tool, decoded.arguments))
    return found


async def run_reads(
    stage: Stage, spec: TaskSpec, case: Case, texts: tuple[str, ...], step: Step
) -> None:
    """``spec`` and ``stage`` are those of the probe bundle; ``texts``: what the solution read."""
    elsewhere = case.spec.proxy.modes if case.spec.proxy is not None else {}
    reads = [
        tool
        for tool in case.spec.tools
        if tool.effect == "read"
        and tool.name not in case.spec.forbidden_tools
        and tool.name not in elsewhere
    ]
    if not reads:
        return
    solution = decoded_calls(case)
    jobs: list[tuple[str, dict[str, Any]]] = []
    for tool in reads:
        played = [arguments for name, arguments in solution if name == tool.name]
        jobs += [(tool.name, each) for each in argument_sets(case.spec, tool, played, texts)]
    seen = await _sweep(stage, spec, "reads", jobs, 1, step)
    _changes(_no_state(seen, "reads", step), step)
    _crashes(seen, step)
    _ignored(seen, solution, step)
    stable = {tool.name for tool in reads if tool.idempotent}
    again = [(name, arguments) for name, arguments in solution if name in stable]
    _unstable(await _sweep(stage, spec, "repeated-reads", again, REPEATS, step), step)
    step.note = f"{len(seen)} reads played"


async def run_writes(
    stage: Stage, spec: TaskSpec, case: Case, texts: tuple[str, ...], step: Step
) -> None:
    """Every change of a task, also those that the solution never makes, with many arguments: one
    that fails leaves the world alone, and one that nobody plays works at all."""
    elsewhere = case.spec.proxy.modes if case.spec.proxy is not None else {}
    refused = {*elsewhere, *case.spec.forbidden_tools}
    tools = [tool for tool in case.spec.tools
             if tool.effect != "read" and tool.name not in refused]  # fmt: skip
    if not tools or has_shell(case.spec):
        return
    solution = decoded_calls(case)
    jobs: list[tuple[str, dict[str, Any]]] = []
    for tool in tools:
        played = [arguments for name, arguments in solution if name == tool.name]
        # what is declared idempotent twice, one call after the other
        times = 2 if tool.idempotent else 1
        for each in _few_of_each(argument_sets(case.spec, tool, played, texts)):
            jobs += [(tool.name, each)] * times
    seen = await _sweep(stage, spec, "writes", jobs, 1, step)
    stated = _no_state(seen, "writes", step)
    _not_idempotent(stated, {tool.name for tool in tools if tool.idempotent}, step)
    used = {name for name, _ in solution}
    _crashes([call for call in seen if call["tool"] not in used], step)
    for call in stated:
        kind, text = call["outcomes"][0]
        if call["changed"] and kind != "value":
            step.add(
                "lying-tool",
                f"tool {call['tool']}",
                f"{_shown(call)} answers with an error ({text[:80]!r}) and yet changes the end "
                "state; check everything before the first change",
            )
            return
    for name in dict.fromkeys(call["tool"] for call in seen):
        kinds = {call["outcomes"][0][0] for call in seen if call["tool"] == name}
        if name not in used and kinds == {"refused"}:
            step.add(
                "unplayed-write",
                f"tool {name}",
                "no solution calls it and it refused everything it was tried with; nobody knows "
                "that it works",
                "warning",
            )


def _few_of_each(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first set, and MAX_WRITES that differ from it in each argument."""
    found = sets[:1]
    for key in dict.fromkeys(key for each in sets for key in each):
        differ = [each for each in sets[1:] if each.get(key) != sets[0].get(key)
                  and each not in found]  # fmt: skip
        found += differ[:MAX_WRITES]
    return found


def _not_idempotent(seen: list[dict[str, Any]], names: set[str], step: Step) -> None:
    """The second of two equal calls in a row changes nothing, where a tool says so."""
    for first, second in pairwise(seen):
        same = (first["tool"], first["arguments"]) == (second["tool"], second["arguments"])
        if same and first["tool"] in names and second["changed"] and (
            second["outcomes"][0][0] == "value"
        ):  # fmt: skip
            step.add(
                "not-idempotent",
                f"tool {first['tool']}",
                f"is declared idempotent, but {_shown(second)} changes the end state again when it "
                "is repeated; a lost reply is then repaired by doing it twice",
            )
            return


def _broken_argument(mine: list[dict[str, Any]], name: str, step: Step) -> None:
    """An optional argument with which a read always crashes, and without which it answers."""
    for key in dict.fromkeys(key for call in mine for key in call["arguments"]):
        kinds = [call["outcomes"][0][0] for call in mine if key in call["arguments"]]
        without = [call["outcomes"][0][0] for call in mine if key not in call["arguments"]]
        if len(kinds) > 1 and set(kinds) == {"crash"} and "value" in without:
            step.add(
                "broken-argument",
                f"tool {name}: {key}",
                f"answers without it and crashed in all {len(kinds)} calls with it; repair it or "
                "take it out of the schema",
            )


def _ignored(
    seen: list[dict[str, Any]], solution: list[tuple[str, dict[str, Any]]], step: Step
) -> None:
    """Arguments that change nothing of the answer, whatever they are: an error where the solution
    relies on one."""
    for name in dict.fromkeys(call["tool"] for call in seen):
        mine = [call for call in seen if call["tool"] == name]
        for key in dict.fromkeys(key for call in mine for key in call["arguments"]):
            groups: dict[str, list[dict[str, Any]]] = {}
            for call in mine:
                rest = {other: value for other, value in call["arguments"].items() if other != key}
                groups.setdefault(json.dumps(rest, sort_keys=True), []).append(call)
            group = max(groups.values(), key=len)
            values = {json.dumps(call["arguments"].get(key)) for call in group}
            outcomes = {tuple(call["outcomes"][0]) for call in group}
            if len(values) < MIN_VALUES or len(outcomes) > 1 or next(iter(outcomes))[0] != "value":
                continue
            relied = any(tool == name and key in arguments for tool, arguments in solution)
            shown = ", ".join(sorted(values)[:4])
            step.add(
                "ignored-argument",
                f"tool {name}: {key}",
                f"answers the same with {len(values)} values of it ({shown[:80]}, ...); let it "
                "have an effect, or take it out",
                "error" if relied else "warning",
            )


def never_played(cases: list[Case], bundle_name: str, step: Step) -> None:
    """Reads that no solution makes: nothing says that their answers are right."""
    if bundle_name == BUNDLE_NAME:
        return  # the shell world's own tools
    used = {name for case in cases for name, _ in decoded_calls(case)}
    for tool in cases[0].spec.tools:
        if tool.name not in used and tool.effect == "read":
            step.add(
                "unplayed-read",
                f"tool {tool.name}",
                "no solution calls it, so nothing here depends on what it answers: it may be wrong "
                "and nobody sees it; let a solution use it, or take it out",
                "warning",
            )


async def _sweep(
    stage: Stage,
    spec: TaskSpec,
    name: str,
    jobs: list[tuple[str, dict[str, Any]]],
    repeat: int,
    step: Step,
) -> list[dict[str, Any]]:
    """What each call that was reached in time answered; a sweep that did not run is a finding."""
    if not jobs:
        return []
    arguments = {"calls": json.dumps(jobs), "repeat": repeat, "budget_s": SWEEP_S}
    script = Script(name, ((RawCall(SWEEP_TOOL, json.dumps(arguments)),),))
    played = await stage.play(spec, script)
    answer = played.observations[0] if played.observations else None
    if answer is None or answer.error is not None:
        words = played.start_text if answer is None else answer.text
        step.add(
            "not-checked",
            f"effects: {name}",
            f"the reads could not be played: {words[:200]}; a read must answer in time with any "
            "argument its schema allows",
        )
        return []
    return json.loads(answer.text)


def _no_state(seen: list[dict[str, Any]], name: str, step: Step) -> list[dict[str, Any]]:
    """The calls up to the first after which the world could not tell its end state: a finding, and
    nothing is known of what follows."""
    for number, call in enumerate(seen):
        if call["lost"] is not None:
            step.add(
                "not-checked",
                f"effects: {name}",
                f"after {_shown(call)} end_state() failed ({call['lost'].partition(': ')[2]}), so "
                "nothing is known of what that call and those after it change"
                + (_LEFT_OPEN if _OPEN_FILES.search(call["lost"]) else ""),
            )
            return seen[:number]
    return seen


def _changes(seen: list[dict[str, Any]], step: Step) -> None:
    for call in seen:
        if call["changed"]:
            step.add(
                "effect-mislabeled",
                f"tool {call['tool']}",
                f"is a read, but {_shown(call)} changes the end state; declare effect write",
            )
            return  # what follows is another world


def _crashes(seen: list[dict[str, Any]], step: Step) -> None:
    for name in dict.fromkeys(call["tool"] for call in seen):
        mine = [call for call in seen if call["tool"] == name]
        kinds = [outcome for call in mine for outcome in call["outcomes"]]
        crashed = [call for call in mine if call["outcomes"][0][0] == "crash"]
        _broken_argument(mine, name, step)
        if crashed and not any(kind == "value" for kind, _ in kinds):
            step.add(
                "broken-tool",
                f"tool {name}",
                f"never answered in {len(mine)} calls and crashed in {len(crashed)}, e.g. "
                f"{_shown(crashed[0])}: {crashed[0]['outcomes'][0][1][:120]}",
            )
        elif crashed:
            step.add(
                "tool-crashes",
                f"tool {name}",
                f"crashes with arguments its schema allows, e.g. {_shown(crashed[0])}: "
                f"{crashed[0]['outcomes'][0][1][:120]}; raise ToolError with a line for the model",
                "warning",
            )


def _unstable(seen: list[dict[str, Any]], step: Step) -> None:
    for call in seen:
        if len(call["outcomes"]) > 1:
            (_, first), (_, other), *_ = call["outcomes"]
            step.add(
                "unstable-read",
                f"tool {call['tool']}",
                f"is declared idempotent, but {_shown(call)} in an unchanged world answered "
                f"{first[:80]!r} and {other[:80]!r} within {call['runs']} calls"
                + (_LEFT_OPEN if _OPEN_FILES.search(f"{first} {other}") else ""),
            )


def _shown(call: dict[str, Any]) -> str:
    return f"{call['tool']}({json.dumps(call['arguments'], ensure_ascii=False)[:100]})"
