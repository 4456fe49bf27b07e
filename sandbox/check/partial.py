"""The solution with a piece left out, or with one too many: neither may pass.

Pieces are the calls that change the world, the entries of JSON and CSV artifacts, and the parts of
an answer that is a list. What the verifier itself scores below the solution must not pass either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sandbox.calls.decode import decode
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError
from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Severity, Step
from sandbox.check.probe import STATE_KEY
from sandbox.check.scripts import Script
from sandbox.check.values import TOLERANT, other_answer, siblings
from sandbox.check.written import Written, overwriting
from sandbox.session import RawCall
from sandbox.shell.world import BUNDLE_NAME
from sandbox.task import TaskSpec, ToolBundle

MAX_LEFT_OUT = 6
MAX_EXTRA = 12
MAX_ENTRIES = 3
"""Entries of a JSON artifact that are made wrong, beside the last."""
NEARLY = 0.8
"""A wrong result that passes with more than this share of the solution's score: a warning, as the
author may mean it."""
_SEPARATORS = ("\n", ";", ",")
_TABLES = (".csv", ".tsv", ".jsonl")


@dataclass(frozen=True, slots=True)
class Variant:
    """A result that is not the solution's. ``rule``: the finding when it passes."""

    rule: str
    what: str
    script: Script
    severity: Severity = "error"


def left_out(spec: TaskSpec, bundle: ToolBundle, oracle: Script) -> list[Variant]:
    """The solution without one of the calls that change the world."""
    if bundle.name == BUNDLE_NAME:
        return []  # a shell command is no piece of a result; its artifacts are
    places = writes(spec, oracle)
    step = max(1, len(places) // MAX_LEFT_OUT)
    found = []
    for turn, place, tool, _ in places[::step][:MAX_LEFT_OUT]:
        rounds = list(oracle.rounds)
        rounds[turn] = rounds[turn][:place] + rounds[turn][place + 1 :]
        script = replace(oracle, name="oracle-less-one", rounds=tuple(filter(None, rounds)))
        what = f"without its call {tool}({oracle.rounds[turn][place].arguments_text[:80]})"
        found.append(Variant("partial-passes", what, script))
    return found


def one_more(
    spec: TaskSpec, bundle: ToolBundle, oracle: Script, texts: tuple[str, ...]
) -> list[Variant]:
    """The solution, then one of its changes again on something else of the same kind."""
    if bundle.name == BUNDLE_NAME:
        return []
    made = [(tool, arguments) for _, _, tool, arguments in writes(spec, oracle)]
    schemas = {tool.name: tool.schema.get("properties", {}) for tool in spec.tools}
    found: list[tuple[str, dict[str, Any]]] = []
    for rank in range(3):  # every change once before any twice
        for tool, arguments in made:
            for key, value in arguments.items():
                used = [other.get(key) for name, other in made if name == tool]
                others = siblings(value, spec.environment.data, texts, schemas[tool].get(key))
                fresh = [other for other in others if other not in used] or others
                if rank < len(fresh):
                    call = (tool, {**arguments, key: fresh[rank]})
                    if call not in made and call not in found:
                        found.append(call)
    variants = []
    for tool, arguments in found[:MAX_EXTRA]:
        text = json.dumps(arguments, ensure_ascii=False)
        script = replace(
            oracle, name="oracle-and-one", rounds=(*oracle.rounds, (RawCall(tool, text),))
        )
        variants.append(Variant("overdoing-passes", f"and then {tool}({text[:80]})", script))
    return variants


def writes(spec: TaskSpec, oracle: Script) -> list[tuple[int, int, str, dict[str, Any]]]:
    """(turn, place in it, tool, arguments); a call that cannot be decoded changes nothing."""
    table = ToolTable(spec.tools, spec.forbidden_tools)
    found = []
    for turn, calls in enumerate(oracle.rounds):
        for place, call in enumerate(calls):
            decoded = decode(call, table)
            if not isinstance(decoded, CallError) and table[decoded.tool].effect != "read":
                found.append((turn, place, decoded.tool, decoded.arguments))
    return found


def answer_variants(oracle: Script) -> list[Variant]:
    """A list as the answer: without its last part, and with another part."""
    answer = oracle.final_text
    for separator in _SEPARATORS:
        parts = [part.strip() for part in answer.split(separator) if part.strip()]
        number = re.fullmatch(r"[-+]?[\d., ]+\D?", answer.strip()) is not None
        if len(parts) < 2 or (separator == "," and number) or max(map(len, parts)) > 40:
            continue
        fewer, more = separator.join(parts[:-1]), separator.join([*parts, other_answer(parts[-1])])
        return [
            Variant("partial-passes", f"with the answer {fewer[:60]!r}",
                    replace(oracle, name="oracle-shorter-answer", final_text=fewer)),
            Variant("overdoing-passes", f"with the answer {more[-60:]!r}",
                    replace(oracle, name="oracle-longer-answer", final_text=more)),
        ]  # fmt: skip
    return []


def artifact_variants(
    spec: TaskSpec, oracle: Script, written: Written, read: list[str]
) -> list[Variant]:
    """Entries of the artifacts that the verifier reads: one gone, one too many, one wrong."""
    found = []
    for path in read:
        content = written.artifacts[path].decode("utf-8", "replace")
        for rule, what, text, severity in _edited(content, path, spec.instruction):
            script = overwriting(f"oracle-{what.replace(' ', '-')}", oracle, [path], text)
            found.append(Variant(rule, f"with {what} in {path}", script, severity))
    return found


def tables(written: Written) -> list[str]:
    """Artifacts that are lists of lines."""
    return [path for path, content in written.artifacts.items()
            if path.endswith(_TABLES) and content.count(b"\n") >= 2][:4]  # fmt: skip


def _edited(content: str, path: str, instruction: str) -> Iterator[tuple[str, str, str, Severity]]:
    """(rule, what, text, severity)"""
    if path.endswith(_TABLES):
        lines = content.splitlines()
        yield "partial-passes", "one line less", "\n".join(lines[:-1]) + "\n", "error"
        more = "\n".join([*lines, other_answer(lines[-1])]) + "\n"
        yield "overdoing-passes", "one line more", more, "error"
        return
    if _is_json(content):
        yield from edited_json(content, instruction)
        return
    lines = content.splitlines()
    if len(lines) > 1:
        yield "partial-passes", "one line less", "\n".join(lines[:-1]) + "\n", "error"
    around = f"parl-other\n{content}\nparl-other\n"
    yield "overdoing-passes", "other lines around it", around, "error"


def _is_json(content: str) -> bool:
    try:
        return isinstance(json.loads(content), dict | list)
    except ValueError:  # the question itself
        return False


def edited_json(content: str, instruction: str) -> Iterator[tuple[str, str, str, Severity]]:
    """(rule, what, text, severity) of a JSON object or list with an entry gone, added or wrong."""
    value = json.loads(content)
    if isinstance(value, list) and value:
        yield "partial-passes", "one element less", json.dumps(value[:-1]), "error"
        yield "overdoing-passes", "one element more", json.dumps([*value, _other(value[-1])]), (
            "error")  # fmt: skip
        yield "overdoing-passes", "one wrong element", json.dumps([_other(value[0]), *value[1:]]), (
            "error")  # fmt: skip
    elif isinstance(value, dict) and value:
        key = next(reversed(value))
        # a table of things has keys that the agent finds out, a form has those it was told
        table = not any(str(name) in instruction for name in value) and (
            len({type(inner) for inner in value.values()}) == 1
        )
        severity: Severity = "error" if table else "warning"
        less = {name: inner for name, inner in value.items() if name != key}
        yield "partial-passes", "one entry less", json.dumps(less), "error"
        more = {**value, "parl-other": _other(value[key])}
        yield "overdoing-passes", "one entry more", json.dumps(more), severity
        wrong = {**value, key: _other(value[key])}
        yield "overdoing-passes", "one wrong value", json.dumps(wrong), severity
        for name in [name for name in value if name != key][:MAX_ENTRIES]:
            wrong = {**value, name: _other(value[name])}
            yield "overdoing-passes", f"a wrong {name[:20]!r}", json.dumps(wrong), severity
        near = next((name for name, inner in value.items() if type(inner) is int), None)
        if near is not None and not TOLERANT.search(instruction):
            wrong = {**value, near: value[near] + 1}
            yield "overdoing-passes", f"{near[:20]!r} off by one", json.dumps(wrong), severity


def _other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 3 + 7
        case str():
            return other_answer(value)
        case list():
            return [*value, "parl-other"]
        case dict() if value:
            return {key: _other(inner) for key, inner in value.items()}
    return "parl-other"


def half_right(
    spec: TaskSpec, bundle: ToolBundle, oracle: Script, written: Written
) -> list[Script]:
    """A few of these results, and the solution with another answer: what a verifier that samples
    or goes by an order judges by luck."""
    wrong = replace(oracle, name="oracle-other-answer", final_text=other_answer(oracle.final_text))
    variants = left_out(spec, bundle, oracle)[:4] + answer_variants(oracle)
    if bundle.name == BUNDLE_NAME:  # each verdict runs test.sh, which takes its time
        names = [*written.json_artifacts, *tables(written)][:1]
        variants += artifact_variants(spec, oracle, written, names)[:1]
        return [variant.script for variant in variants]
    return [wrong, *(variant.script for variant in variants)]


async def try_variants(
    stage: Stage, spec: TaskSpec, variants: list[Variant], written: Written, step: Step
) -> int:
    """Play each; ``spec`` and ``stage`` are those of the probe bundle. Episodes played."""
    for variant in variants:
        played = await stage.play(spec, variant.script)
        if variant.script.name == "oracle-and-one" and played.observations[-1].error is not None:
            continue  # the world refused it
        judge(variant, played, written, step)
    return len(variants)


def judge(variant: Variant, played: Played, written: Written, step: Step) -> None:
    """A wrong result that passes is a finding, unless the world is as the solution leaves it."""
    if not played.passed:
        return
    calls = variant.script.name in ("oracle-less-one", "oracle-and-one")
    if calls and str(played.verdict.details.get(STATE_KEY)) == written.state:
        return  # what was left out or added changes nothing that is reported
    scored = played.verdict.correctness or 0.0
    lower = scored < written.correctness
    severity = variant.severity
    if lower and scored > NEARLY * written.correctness and not calls:
        severity = "warning"
    said = f"scored {scored:g}, which passes"
    if lower:
        said += f" though the solution scores {written.correctness:g}: raise pass_threshold"
    elif variant.rule == "partial-passes":
        said += "; the verifier must ask for everything that the task asks for"
    else:
        said += "; the verifier must refuse what is wrong, and not only look for what is right"
    step.add(variant.rule, f"tamper: oracle {variant.what}"[:200], said, severity)
