"""A world for formats that describe tools but bring none: calls are recorded and compared.

The tools look records up in ``data["db"]`` where they are declared reads, and otherwise only take
down what they are asked. The verifier compares the calls with those the format calls right.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.importers.base import Imported, manifest_text, new_folder, write_files
from sandbox.manifest.native import slug

HERE = Path(__file__).parent


@dataclass(slots=True)
class RecordedTool:
    """``name`` as the format writes it, ``schema`` a JSON Schema of the arguments."""

    name: str
    description: str
    schema: dict[str, Any]
    effect: str = "write"

    @property
    def identifier(self) -> str:
        """The name as a Python function; the original stays an alias."""
        plain = re.sub(r"\W", "_", self.name)
        return plain if not plain[:1].isdigit() else f"tool_{plain}"


@dataclass(frozen=True, slots=True)
class RunningWorld:
    """Code in place of records: ``tools_source`` defines ``_use(name, arguments, reads)``."""

    tools_source: str
    verify_source: str
    environment: dict[str, Any]
    verifier: dict[str, Any]


@dataclass(slots=True)
class RecordedTask:
    """``calls``: right calls as {name, arguments: {key: [accepted values]}, required}; a key that
    accepts "" may be left out. ``exact``: no call beside them. ``contains``: what the final answer
    must say. ``answer``: the final answer itself. ``script``: the oracle's calls. ``world``: the
    format's own code runs, and judges instead of ``calls``, ``contains`` and ``answer``."""

    name: str
    task_type: str
    source: str
    instruction: str
    tools: list[RecordedTool]
    calls: list[dict[str, Any]] = field(default_factory=list)
    exact: bool = True
    contains: list[str] = field(default_factory=list)
    answer: str | None = None
    script: list[dict[str, Any]] = field(default_factory=list)
    final_text: str = "done"
    db: dict[str, Any] = field(default_factory=dict)
    world: RunningWorld | None = None
    downgrades: list[str] = field(default_factory=list)


def write_recorded(task: RecordedTask, dest: Path) -> Imported:
    """Write the folder; names that are no identifiers become a downgrade."""
    folder = new_folder(dest, task.name.split("/")[-1])
    sections: dict[str, Any] = {}
    names: dict[str, str] = {}
    for tool in task.tools:
        names[tool.name] = tool.identifier
        section: dict[str, Any] = {"schema": tool.schema, "effect": tool.effect}
        if tool.identifier != tool.name:
            section["aliases"] = [tool.name]
            task.downgrades.append(f"tool {tool.name} is called {tool.identifier}")
        sections[tool.identifier] = section
    if task.world is None and any(tool.effect != "read" or not task.db for tool in task.tools):
        task.downgrades.append("tools do nothing: they record their calls and answer 'recorded'")
    script = [
        {"name": names.get(call["name"], call["name"]), "arguments": call["arguments"]}
        for call in task.script
    ]
    lines = [json.dumps(call, ensure_ascii=False) for call in script]
    lines.append(json.dumps({"final_text": task.final_text}, ensure_ascii=False))
    data: dict[str, Any] = {
        "calls": [{**call, "name": names.get(call["name"], call["name"])} for call in task.calls],
        "exact": task.exact,
        "contains": task.contains,
        "answer": task.answer,
    }
    environment: dict[str, Any] = {"db": task.db}
    tools_source = _tools_source(task.tools)
    verify_source = (HERE / "recorded_verify.py").read_text(encoding="utf-8")
    if task.world is not None:
        environment, data = task.world.environment, task.world.verifier
        tools_source = _tools_source(task.tools, task.world.tools_source, "_use")
        verify_source = task.world.verify_source
    write_files(
        folder,
        {
            "task.toml": manifest_text(
                name=task.name,
                task_type=task.task_type,
                source=task.source,
                parl={
                    "budget": {"units": {"calls": float(max(1, len(script)))},
                               "max_turns": max(8, 2 * len(script) + 4)},
                    "tools": sections,
                },
            ),
            "instruction.md": task.instruction.strip() + "\n",
            "tools/tools.py": tools_source,
            "tests/verify.py": verify_source,
            "tests/data.json": json.dumps(data, ensure_ascii=False, indent=1) + "\n",
            "environment/data.json": json.dumps(environment, ensure_ascii=False) + "\n",
            "solution/calls.jsonl": "\n".join(lines) + "\n",
        },
    )  # fmt: skip
    return Imported(folder, task.downgrades)


def _tools_source(tools: list[RecordedTool], head: str = "", use: str = "_take") -> str:
    parts = [(head or (HERE / "recorded_tools.py").read_text(encoding="utf-8")).rstrip()]
    for tool in tools:
        text = " ".join(tool.description.split()) or tool.name
        parts.append(
            f"@tool(effect={tool.effect!r})\n"
            f"def {tool.identifier}(**arguments):\n"
            f"    {json.dumps(text, ensure_ascii=False)}\n"
            f"    return {use}({tool.identifier!r}, arguments, {tool.effect == 'read'})"
        )
    return "\n\n\n".join(parts) + "\n"


def task_name(org: str, name: str) -> str:
    """``org/name`` with characters that Harbor allows."""
    return f"{slug(org)}/{slug(name)}"
