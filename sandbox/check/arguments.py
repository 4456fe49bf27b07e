"""The arguments of the solution's changes, each replaced in turn: a verifier that pays all the same
does not look at that argument. And the arguments that the solution leaves out: do they work at all?
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sandbox.check.answers import same_score
from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Step
from sandbox.check.partial import writes
from sandbox.check.probe import STATE_KEY
from sandbox.check.scripts import Script, has_shell
from sandbox.check.values import TOLERANT, leaves, other_answer, siblings
from sandbox.check.written import Written
from sandbox.session import RawCall
from sandbox.task import TaskSpec

MAX_CALLS_A_TOOL = 2
MAX_ARGUMENTS = 10
"""Arguments that are replaced; each costs one episode, and one more if it is paid."""
MAX_OPTIONAL = 4
_CRASHED = re.compile(
    r"(?i)\b(\w*Error|\w*Exception|Traceback|NoneType|HTTP 5\d\d|server ended|unexpected keyword)\b"
    r"|^'[\w-]+'$"
)
"""What an error of the program looks like, where a refusal says what is wrong."""


@dataclass(frozen=True, slots=True)
class Place:
    """An argument of a call of the solution. ``number``: of the call over all turns."""

    turn: int
    place: int
    number: int
    tool: str
    arguments: dict[str, Any]
    key: str


def argument_places(spec: TaskSpec, oracle: Script) -> list[Place]:
    """Arguments of the calls that change the world: first and last call of each tool."""
    made = writes(spec, oracle)
    starts = [sum(map(len, oracle.rounds[:turn])) for turn in range(len(oracle.rounds))]
    chosen = []
    for tool in dict.fromkeys(name for _, _, name, _ in made):
        mine = [entry for entry in made if entry[2] == tool]
        chosen += [mine[0], *mine[1:][-(MAX_CALLS_A_TOOL - 1) :]]
    return [
        Place(turn, place, starts[turn] + place, tool, arguments, key)
        for turn, place, tool, arguments in chosen
        for key in arguments
    ][:MAX_ARGUMENTS]


def others(value: Any, schema: dict[str, Any], data: Any, texts: tuple[str, ...]) -> list[Any]:
    """Two values of the same type, the likelier to be paid first; [] for nested ones."""
    if isinstance(value, bool):
        return [not value]
    if schema.get("enum"):
        return [entry for entry in schema["enum"] if entry != value][:2]
    if isinstance(value, int | float):
        near = value + 1 if isinstance(value, int) else round(value * 1.01 + 0.01, 4)
        found = [near, 3 * value + 7]
        low, high = schema.get("minimum"), schema.get("maximum")
        if high is not None:
            found = [value - 1 if entry > high else entry for entry in found]
        return [
            entry
            for entry in dict.fromkeys(found)
            if (low is None or entry >= low) and entry != value
        ]
    if isinstance(value, str):
        alike = [entry for entry in siblings(value, data, texts, schema) if isinstance(entry, str)]
        return [*alike[:1], *alike[-1:], other_answer(value)][:2] if alike else [
            other_answer(value), "parl-other"]  # fmt: skip
    return []


def replaced(oracle: Script, place: Place, value: Any, name: str) -> Script:
    """The solution with one argument set to ``value``."""
    arguments = {**place.arguments, place.key: value}
    call = RawCall(place.tool, json.dumps(arguments, ensure_ascii=False))
    rounds = [list(calls) for calls in oracle.rounds]
    rounds[place.turn][place.place] = call
    return replace(oracle, name=name, rounds=tuple(map(tuple, rounds)))


async def try_arguments(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """Episodes played; ``spec`` and ``stage`` are those of the probe bundle."""
    if has_shell(spec):
        return 0  # a shell command is no argument; its artifacts are tried
    count = 0
    schemas = {tool.name: tool.schema.get("properties", {}) for tool in spec.tools}
    for place in argument_places(spec, oracle):
        value = place.arguments[place.key]
        schema = schemas.get(place.tool, {}).get(place.key, {})
        paid: list[tuple[Any, bool]] = []
        tried = 0
        for other in others(value, schema, spec.environment.data, written.texts):
            played = await stage.play(spec, replaced(oracle, place, other, "oracle-argument"))
            count += 1
            if _refused(played, place):
                continue
            tried += 1
            if not same_score(played, written):
                break
            paid.append((other, _state(played) != written.state))
        if tried and len(paid) == tried:
            _unchecked(spec, place, value, paid, step)
    return count + await _optional(stage, spec, oracle, step)


def _unchecked(
    spec: TaskSpec, place: Place, value: Any, paid: list[tuple[Any, bool]], step: Step
) -> None:
    """Severity by where the value comes from: what the instruction names, what the world holds, and
    numbers that a call needs must be judged; what is of the agent's own choice need not be."""
    said = _names(spec.instruction, value)
    of_world = any(leaf.value == value for leaf in leaves(spec.environment.data))
    required = next(tool.schema.get("required", ()) for tool in spec.tools
                    if tool.name == place.tool)  # fmt: skip
    worked_out = isinstance(value, int | float) and place.key in required
    if not (said or of_world or worked_out):
        return
    if isinstance(value, int | float) and len(paid) == 1 and TOLERANT.search(spec.instruction):
        return
    seen = any(changed for _, changed in paid)
    known = "which the instruction names" if said else "which the world decides"
    tried = " and ".join(json.dumps(other, ensure_ascii=False)[:40] for other, _ in paid)
    step.add(
        "unchecked-argument",
        f"tamper: {place.tool}.{place.key}",
        f"{json.dumps(value, ensure_ascii=False)[:40]}, {known}, is replaced by {tried} and the "
        "solution's score is paid all the same; "
        + ("the verifier must look at it" if seen else "end_state() does not even report it"),
        "error" if seen and (said or len(paid) > 1) else "warning",
    )


def _names(instruction: str, value: Any) -> bool:
    text = str(value).strip()
    return len(text) > 1 and (
        re.search(rf"(?i)(?<!\w){re.escape(text)}(?!\w)", instruction) is not None
    )


async def _optional(stage: Stage, spec: TaskSpec, oracle: Script, step: Step) -> int:
    """Each optional argument that the solution does not pass, with several values: one that never
    works is broken."""
    count = 0
    for place, schema in _left_out(spec, oracle):
        refusals: list[str] = []
        values = _values(schema)
        for value in values:
            played = await stage.play(spec, replaced(oracle, place, value, "oracle-optional"))
            count += 1
            if not _refused(played, place):
                break
            refusals.append(played.observations[min(place.number, len(played.observations) - 1)]
                            .text)  # fmt: skip
        if values and len(refusals) == len(values):
            broken = any(_CRASHED.search(text.strip()) for text in refusals)
            step.add(
                "broken-argument",
                f"tool {place.tool}: {place.key}",
                f"the call succeeds without it and fails with {json.dumps(values)[:60]}: "
                f"{refusals[0][:120]}; repair it, or let its schema and description say which "
                "values are taken",
                "error" if broken else "warning",
            )
    return count


def _left_out(spec: TaskSpec, oracle: Script) -> Iterator[tuple[Place, dict[str, Any]]]:
    made = writes(spec, oracle)
    starts = [sum(map(len, oracle.rounds[:turn])) for turn in range(len(oracle.rounds))]
    given = {(tool, key) for _, _, tool, arguments in made for key in arguments}
    found = 0
    for tool in spec.tools:
        first = next((entry for entry in made if entry[2] == tool.name), None)
        for key, schema in tool.schema.get("properties", {}).items():
            if first is None or (tool.name, key) in given or found >= MAX_OPTIONAL:
                continue
            if key not in tool.schema.get("required", ()) and len(_values(schema)) > 1:
                found += 1
                turn, place, name, arguments = first
                yield Place(turn, place, starts[turn] + place, name, arguments, key), schema


def _values(schema: dict[str, Any]) -> list[Any]:
    """Values of an argument other than its default; none for texts, whose form is not known."""
    if schema.get("enum"):
        return [entry for entry in schema["enum"] if entry != schema.get("default")][:3]
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "integer":
            default = schema.get("default")
            start = default if isinstance(default, int) else 1
            found = [start + 1, start + 2, 1, 2, 5, low, high]
            inside = [
                value
                for value in dict.fromkeys(found)
                if isinstance(value, int) and value != default
                and (low is None or value >= low) and (high is None or value <= high)
            ]  # fmt: skip
            return inside[:3]
        case "boolean":
            return [True, False]
    return []


def _refused(played: Played, place: Place) -> bool:
    """The replaced call failed, or the episode ended before it."""
    seen = played.observations
    return len(seen) <= place.number or seen[place.number].error is not None


def _state(played: Played) -> str:
    return str(played.verdict.details.get(STATE_KEY))
