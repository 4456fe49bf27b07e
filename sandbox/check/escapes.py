"""Names that are paths or commands: does a tool write, read or run outside the place it means?

Each text argument gets ``../`` paths, absolute paths and shell syntax, in the task's own process
after the solution, so that the folders it makes are there.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.probe import ESCAPE_TOOL
from sandbox.check.reads import decoded_calls
from sandbox.check.scripts import Script, has_shell
from sandbox.check.subject import Case
from sandbox.check.values import argument_sets
from sandbox.session import RawCall
from sandbox.task import TaskSpec
from sandbox.tool_spec import ToolSpec

BUDGET_S = 6.0
_WRITES = ("{mark}", "../{mark}", "../../{mark}", "{here}/{mark}")
_READS = ("parl-secret", "parl-secret.txt", "../parl-secret", "../parl-secret.txt",
          "../../parl-secret.txt", "{here}/parl-secret.txt", "/proc/self/status")  # fmt: skip
_COMMANDS = ("x; touch {mark}", "$(touch {mark})", "x' ; touch {mark} ; '", '"; touch {mark} ; "')


async def run_escapes(
    stage: Stage, spec: TaskSpec, case: Case, texts: tuple[str, ...], step: Step
) -> None:
    """``spec`` and ``stage`` are those of the probe bundle; ``texts``: what the solution read. A
    task with a shell has nothing to escape from."""
    if has_shell(case.spec):
        return
    jobs = _jobs(case, texts)
    if not jobs:
        return
    arguments = {"jobs": json.dumps(jobs), "budget_s": BUDGET_S}
    probe = (RawCall(ESCAPE_TOOL, json.dumps(arguments)),)
    played = await stage.play(spec, Script("escapes", (*case.oracle.rounds, probe)))
    answer = played.observations[-1] if played.observations else None
    if answer is None or answer.error is not None or answer.tool != ESCAPE_TOOL:
        words = played.start_text if answer is None else answer.text
        step.add("not-checked", "effects: escapes", f"could not be played: {words[:160]}",
                 "warning")  # fmt: skip
        return
    for entry in json.loads(answer.text):
        _judge(entry, step)


def _jobs(case: Case, texts: tuple[str, ...]) -> list[list[Any]]:
    """[tool, arguments, key, forms], changes before reads: what they make is what is read."""
    elsewhere = case.spec.proxy.modes if case.spec.proxy is not None else {}
    refused = {*elsewhere, *case.spec.forbidden_tools}
    tools = [tool for tool in case.spec.tools if tool.name not in refused]
    solution = decoded_calls(case)
    jobs: list[list[Any]] = []
    for tool in sorted(tools, key=lambda each: each.effect == "read"):
        played = [arguments for name, arguments in solution if name == tool.name]
        sets = argument_sets(case.spec, tool, played, texts)
        for key in _text_arguments(tool):
            forms = _COMMANDS if tool.effect != "read" else (*_READS, *_COMMANDS[:2])
            forms = [*(_WRITES if tool.effect != "read" else ()), *forms]
            jobs += [[tool.name, sets[0] if sets else {}, key, forms]]
    return jobs


def _text_arguments(tool: ToolSpec) -> list[str]:
    """Arguments that take any text of this length."""
    return [
        key
        for key, schema in tool.schema.get("properties", {}).items()
        if schema.get("type") == "string"
        and not set(schema) & {"enum", "const", "pattern", "format"}
        and schema.get("maxLength", 1000) >= 30
    ]


def _judge(entry: dict[str, Any], step: Step) -> None:
    where = f"tool {entry['tool']}: {entry['key']}"
    allowed = entry["plain"]
    home = entry.get("home", "")
    for form, path in entry["escapes"]:
        shown = os.path.relpath(path, home) if home else path
        if "touch" in form:
            # a tool may take all of the text for a name, but then it is not only the mark
            step.add(
                "command-injection",
                where,
                f"{form!r} ran as a command and made {shown}; pass arguments as a list, without a "
                "shell",
            )
            return
        inside = any(path == place or path.startswith(place + os.sep) for place in allowed)
        if not inside:
            meant = os.path.relpath(allowed[0], home) if allowed and home else "nowhere"
            step.add(
                "path-traversal",
                where,
                f"{form.replace('{mark}', 'x')!r} writes "
                f"{re.sub('parl-mark-[0-9]+-', 'x', shown)}, a plain name in {meant!r}: an agent "
                "can write over the world's own files; refuse names with '/', or resolve the path "
                "and compare",
            )
            return
    plain = any(form in ("parl-secret", "parl-secret.txt") for form in entry["reads"])
    out = [form for form in entry["reads"] if form not in ("parl-secret", "parl-secret.txt")]
    if plain:  # the whole working folder is meant
        out = [form for form in out if form == "/proc/self/status"]
    if out:
        step.add(
            "path-traversal",
            where,
            f"{out[0]!r} reads a file outside the folder that plain names are looked up in; refuse "
            "names with '/' or resolve the path and compare",
            "warning" if plain else "error",
        )
