"""Agents as scripts: rounds of tool calls, then a final answer. All that a check plays is one.

``solution/calls.jsonl`` and ``attacks/*.jsonl`` hold one JSON object a line: a call as ``{"name",
"arguments"}`` (a turn of its own), ``{"calls": [...]}`` (one turn) and, last, ``{"final_text"}``.
A shell world may have ``solution/solve.sh`` and ``attacks/*.sh`` instead.
"""

from __future__ import annotations

import base64
import json
import random
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.errors import TaskError
from sandbox.manifest.native import is_native, load_native
from sandbox.manifest.reading import load_manifest, read_text
from sandbox.session import RawCall
from sandbox.shell.world import packed
from sandbox.task import TaskSpec

SHELL_TOOL = "bash"
SHELL_ANSWER = "done"
"""Final text of a .sh script: a shell task judges files."""
_CHUNK = 256 << 10
_END = "PARL_END_OF_FILE"
_SOLVE = "bash /solution/solve.sh"


@dataclass(frozen=True, slots=True)
class Script:
    """``rounds``: turns of calls. ``name`` is what a report calls the agent."""

    name: str
    rounds: tuple[tuple[RawCall, ...], ...] = ()
    final_text: str = ""

    @property
    def num_calls(self) -> int:
        return sum(len(calls) for calls in self.rounds)


def read_script(path: Path, name: str) -> Script:
    """A calls.jsonl; TaskError names file and line."""
    rounds: list[tuple[RawCall, ...]] = []
    final_text = ""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{where}: not valid JSON: {error}") from error
        if isinstance(entry, dict) and isinstance(entry.get("final_text"), str):
            final_text = entry["final_text"]
        elif isinstance(entry, dict) and isinstance(entry.get("calls"), list):
            rounds.append(tuple(_call(call, where) for call in entry["calls"]))
        else:
            rounds.append((_call(entry, where),))
    return Script(name, tuple(rounds), final_text)


def _call(entry: Any, where: str) -> RawCall:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise TaskError(
            f'{where}: {json.dumps(entry)[:80]}: expected {{"name", "arguments"}}, {{"calls"}} or '
            '{"final_text"}'
        )
    arguments = entry.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return RawCall(entry["name"], text)


def shell_script(path: Path, folder: Path, name: str, upload: bool) -> Script:
    """A .sh file run through the tool ``bash``. ``upload``: its whole folder goes to /solution
    first, as Harbor's oracle does; else only its own text runs."""
    if not upload:
        return Script(name, (_bash(path.read_text(encoding="utf-8")),), SHELL_ANSWER)
    rounds = []
    for file, entry in packed(path.parent, folder).items():
        rounds += _uploaded(f"/solution/{file}", base64.b64decode(entry["base64"]))
    given = _solution_env(folder)
    named = " ".join(shlex.quote(f"{name}={value}") for name, value in given.items())
    rounds.append(_bash(f"env {named} bash /solution/solve.sh" if given else _SOLVE))
    return Script(name, tuple(rounds), SHELL_ANSWER)


def _solution_env(folder: Path) -> dict[str, str]:
    """``[solution] env`` of task.toml."""
    file = folder / "task.toml"
    manifest = load_native(file)[0] if is_native(file) else load_manifest(file)
    return manifest.solution.env


def _uploaded(path: str, content: bytes) -> list[tuple[RawCall, ...]]:
    """Calls that write a file: text as text, so that the world can translate its paths."""
    target = shlex.quote(path)
    prepare = f"mkdir -p {shlex.quote(path.rpartition('/')[0])}"
    try:
        text = content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        rounds = [_bash(f"{prepare} && : > {target}")]
        for start in range(0, len(content), _CHUNK):
            part = base64.b64encode(content[start : start + _CHUNK]).decode()
            rounds.append(_bash(f"base64 -d >> {target} <<'{_END}'\n{part}\n{_END}"))
        return rounds
    newline = "" if text.endswith("\n") else "\n"
    return [_bash(f"{prepare} && cat > {target} <<'{_END}'\n{text}{newline}{_END}")]


def _bash(command: str) -> tuple[RawCall, ...]:
    return (RawCall(SHELL_TOOL, json.dumps({"command": command})),)


def oracle_of(folder: Path, spec: TaskSpec) -> Script:
    """The author's solution; TaskError when there is none that this task's tools can play."""
    calls = folder / "solution" / "calls.jsonl"
    if calls.exists():
        return read_script(calls, "oracle")
    shell = folder / "solution" / "solve.sh"
    if shell.exists() and has_shell(spec):
        return shell_script(shell, folder, "oracle", upload=True)
    raise TaskError(
        f"{folder / 'solution'}: no calls.jsonl"
        + (" and no solve.sh" if has_shell(spec) else "")
        + "; without a solution nobody knows that the task can be solved"
    )


def attacks_of(folder: Path, spec: TaskSpec) -> list[Script]:
    """The author's own attacks, by file name; each must score below pass."""
    scripts = []
    for path in sorted((folder / "attacks").glob("*")):
        if path.suffix == ".jsonl":
            scripts.append(read_script(path, path.name))
        elif path.suffix == ".sh" and has_shell(spec):
            scripts.append(shell_script(path, folder, path.name, upload=False))
        elif path.suffix == ".sh":
            raise TaskError(
                f"{path}: a shell attack needs a tool 'bash'; write its calls as a .jsonl file"
            )
    return scripts


def has_shell(spec: TaskSpec) -> bool:
    return any(
        tool.name == SHELL_TOOL and "command" in tool.schema.get("properties", {})
        for tool in spec.tools
    )


NOP = Script("nop")
"""Does nothing and answers nothing."""


def echo_script(spec: TaskSpec) -> Script:
    """Answers with the question."""
    return Script("echo", final_text=spec.instruction)


def random_script(spec: TaskSpec, seed: int) -> Script:
    """Valid calls with random arguments, then a short random answer."""
    draw = random.Random(f"parl-check|{spec.name}|{seed}")
    tools = [tool for tool in spec.tools if tool.name not in spec.forbidden_tools]
    words = spec.instruction.split() or ["x"]
    rounds = []
    for _ in range(min(6, spec.limits.max_turns)):
        if tools:
            tool = draw.choice(tools)
            arguments = _random_value(tool.schema, draw, words, 0)
            rounds.append((RawCall(tool.name, json.dumps(arguments)),))
    answers = ["", "0", "1", "yes", "no", "done", "42", "null", "true", *words[:20]]
    return Script(f"random-{seed}", tuple(rounds), draw.choice(answers))


def _random_value(schema: dict[str, Any], draw: random.Random, words: list[str], depth: int) -> Any:
    """A value that satisfies the usual keywords of a schema."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _random_value(draw.choice(schema[key]), draw, words, depth)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    match kind:
        case "object":
            properties = schema.get("properties", {})
            chosen = [
                key
                for key in properties
                if key in schema.get("required", ()) or (depth < 3 and draw.random() < 0.5)
            ]
            return {key: _random_value(properties[key], draw, words, depth + 1) for key in chosen}
        case "array":
            size = max(schema.get("minItems", 0), draw.randrange(3) if depth < 3 else 0)
            return [
                _random_value(schema.get("items", {}), draw, words, depth + 1) for _ in range(size)
            ]
        case "integer":
            return draw.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 100)))
        case "number":
            return round(draw.uniform(schema.get("minimum", 0), schema.get("maximum", 100)), 3)
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
    return draw.choice(words)
