"""What tells the result in other words: a field that holds what the solution must work out, a file
that the solution does not need.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from typing import Any

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.probe import probe_script
from sandbox.check.reads import decoded_calls
from sandbox.check.scripts import Script
from sandbox.check.subject import Case
from sandbox.check.written import Written
from sandbox.task import TaskSpec

_TARGET = re.compile(
    r"(?i)(^|_|-)(new|next|target|goal|expected|wanted|desired|should|final|result|correct|right"
    r"|after|updated|adjusted|fixed|solution|answer|to_be|proposed)(_|-|$)"
)
"""Names of fields that say: this is what it must become."""
_FIELD = r"([A-Za-z_][\w-]*)[\"']?\s*[:=]?\s*[\"']?{value}(?!\w)"
_REMOVE = """
import pathlib
try:
    pathlib.Path({name!r}).unlink()
    print("removed")
except OSError as error:
    print(error)
"""


async def needed(stage: Stage, spec: TaskSpec, oracle: Script, name: str) -> bool:
    """Whether the solution fails without the file ``name`` (one inside an archive: without the
    archive). True as well for a file that nobody can remove."""
    file = re.sub(r" \((zip|gzip|base64|sqlite).*", "", name)
    probe = probe_script("remove", _REMOVE.format(name=file))
    script = replace(oracle, name="oracle-without-file", rounds=(*probe.rounds, *oracle.rounds))
    played = await stage.play(spec, script)
    removed = bool(played.observations) and played.observations[0].text.strip() == "removed"
    return not (removed and played.passed)


def table_pairs(path: str, text: str) -> dict[str, str] | None:
    """First and last cell of every row of a table with a heading, or None for another text."""
    if not path.endswith((".csv", ".tsv")):
        return None
    rows = list(csv.reader(text.splitlines(), delimiter="\t" if path.endswith(".tsv") else ","))
    found = {row[0]: row[-1] for row in rows[1:] if len(row) > 1}
    return found or None


def told_targets(case: Case, written: Written, step: Step) -> None:
    """A field of the world, or of what tools answer, that holds for each thing the solution changes
    just the value it is changed to."""
    effects = {tool.name: tool.effect for tool in case.spec.tools}
    made = [(tool, arguments) for tool, arguments in decoded_calls(case) if effects[tool] != "read"]
    lines = [line for text in written.texts for line in text.splitlines()]
    lines += _records(case.spec.environment.data, "")
    for tool in dict.fromkeys(name for name, _ in made):
        mine = [arguments for name, arguments in made if name == tool]
        for key in dict.fromkeys(key for arguments in mine for key in arguments):
            values = {str(arguments.get(key)) for arguments in mine}
            if len(mine) < 2 or len(values) < 2 or min(map(len, values)) < 2:
                continue
            fields = [_fields(arguments, key, lines) for arguments in mine]
            for field in sorted(set.intersection(*fields)):
                _told(field, tool, key, case.spec.instruction, step)


def _told(field: str, tool: str, key: str, instruction: str, step: Step) -> None:
    words = [word for word in re.split(r"[_\W]+", field.casefold()) if len(word) > 2]
    asked = all(word[:4] in instruction.casefold() for word in words)
    if asked and not _TARGET.search(field):
        return
    step.add(
        "answer-readable",
        f"field {field}",
        f"holds, for each thing that the solution changes, what {tool} must set {key} to; a policy "
        "copies it instead of working it out: keep it in tests/data.json"
        + ("" if _TARGET.search(field) else ", or let the instruction name it if it is meant"),
        "error" if _TARGET.search(field) else "warning",
    )


def _fields(arguments: dict[str, Any], key: str, lines: list[str]) -> set[str]:
    """Names before the value, in lines that also name what is changed."""
    value = re.escape(str(arguments[key])) if key in arguments else None
    others = [str(other) for name, other in arguments.items()
              if name != key and isinstance(other, str) and len(other) > 1]  # fmt: skip
    if value is None or not others:
        return set()
    pattern = re.compile(_FIELD.format(value=value))
    return {
        field
        for line in lines
        if any(other in line for other in others)
        for field in pattern.findall(line)
    }


def _records(value: Any, name: str) -> list[str]:
    """Every object of nested data as one line that begins with its key; files left out."""
    if isinstance(value, list):
        return [line for inner in value for line in _records(inner, name)]
    if not isinstance(value, dict):
        return []
    flat = [f"{key}: {inner}" for key, inner in value.items()
            if not isinstance(inner, dict | list)]  # fmt: skip
    found = [f"{name} {' '.join(flat)}"] if flat else []
    for key, inner in value.items():
        if key != "files":
            found += _records(inner, str(key))
    return found
