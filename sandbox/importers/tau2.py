"""tau2-bench domains: ``tasks.json``, ``db.json``, ``policy.md``, ``tools.py`` of one folder.

tools.py never runs here. In a box it runs over small stand-ins for tau2's classes and pydantic
(tau2_world, small_models), and the verifier replays the right actions on a fresh data base, as tau2
does. Where it needs more than a box has (tau2_sources says what), reads answer from db.json, writes
are recorded and compared with the task's actions.
"""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.errors import TaskError
from sandbox.importers.base import ImportResult, read_text
from sandbox.importers.recorded import (
    RecordedTask,
    RecordedTool,
    RunningWorld,
    task_name,
    write_recorded,
)
from sandbox.importers.tau2_sources import DomainSources, read_sources, world_text

_EFFECTS = {"READ": "read", "WRITE": "write", "THINK": "read", "GENERIC": "read"}
_SCALARS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
MAX_DB_BYTES = 2 << 20
MAX_RUNNING_BYTES = 6 << 20
"""A box takes its data in one frame."""


def import_tau2(source: Path, dest: Path, limit: int) -> ImportResult:
    """``source`` is the domain's folder; TaskError when one of its files cannot be read."""
    tasks = _json(source / "tasks.json")
    tasks = tasks.get("tasks", []) if isinstance(tasks, dict) else tasks
    db = _json(source / "db.json")
    policy = read_text(source / "policy.md") if (source / "policy.md").exists() else ""
    tools = tools_of(read_text(source / "tools.py"), str(source / "tools.py"))
    sources = read_sources(source)
    if len(json.dumps(db)) > MAX_RUNNING_BYTES:
        sources.missing.append(f"db.json is larger than {MAX_RUNNING_BYTES >> 20} MiB")
    result = ImportResult()
    for task in tasks:
        if limit and len(result.tasks) >= limit:
            break
        make = _recorded if sources.missing else _running
        made = make(_Given(source.resolve().name, task, db, policy, tools, sources))
        if isinstance(made, str):
            result.skipped.append(f"task {task.get('id')}: {made}")
        else:
            result.tasks.append(write_recorded(made, dest))
    return result


def _json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise TaskError(f"{path}: not valid JSON: {error}") from error


@dataclass(slots=True)
class _Given:
    """One task of a domain, and what both ways of importing it find."""

    domain: str
    task: dict[str, Any]
    db: dict[str, Any]
    policy: str
    tools: list[RecordedTool]
    sources: DomainSources
    downgrades: list[str] = field(
        default_factory=lambda: ["user simulator: the scenario is told in the instruction instead"]
    )

    @property
    def criteria(self) -> dict[str, Any]:
        return self.task.get("evaluation_criteria") or {}

    @property
    def basis(self) -> list[str]:
        return [str(item) for item in self.criteria.get("reward_basis") or ["DB", "COMMUNICATE"]]

    def actions(self) -> list[dict[str, Any]]:
        """Those of the agent."""
        given = self.criteria.get("actions") or []
        mine = [action for action in given if action.get("requestor", "assistant") == "assistant"]
        if len(mine) < len(given):
            self.downgrades.append("actions of the user are not asked for")
        return mine

    def contains(self) -> list[str]:
        texts = [str(text) for text in self.criteria.get("communicate_info") or []]
        if texts and "COMMUNICATE" in self.basis:
            self.downgrades.append("COMMUNICATE: the final answer counts, not every message")
        return texts if "COMMUNICATE" in self.basis else []

    def unknown(self, actions: list[dict[str, Any]]) -> str | None:
        names = {tool.name for tool in self.tools}
        unknown = sorted({action["name"] for action in actions} - names)
        if not unknown:
            return None
        return f"its actions name {', '.join(unknown)}, which tools.py does not define"

    def made(self, actions: list[dict[str, Any]], contains: list[str]) -> RecordedTask:
        """What both have; the instruction, the tools and the right way."""
        return RecordedTask(
            name=task_name(f"tau2-{self.domain}", str(self.task.get("id"))),
            task_type=f"tau2-{self.domain}",
            source="tau2-bench",
            instruction=_instruction(self.task, self.policy),
            tools=[RecordedTool(t.name, t.description, t.schema, t.effect) for t in self.tools],
            exact=False,
            contains=contains,
            script=[{"name": a["name"], "arguments": a.get("arguments") or {}} for a in actions],
            final_text="; ".join(contains) or "done",
            downgrades=self.downgrades,
        )


def _running(given: _Given) -> RecordedTask | str:
    """The domain's own tools run; DB, ACTION, ENV_ASSERTION and COMMUNICATE are judged."""
    actions, contains = given.actions(), given.contains()
    if (problem := given.unknown(actions)) is not None:
        return problem
    assertions = _assertions(given)
    judged = [
        name
        for name, there in (("DB", True), ("ACTION", actions), ("ENV_ASSERTION", assertions))
        if name in given.basis and there
    ]
    writes = {tool.name for tool in given.tools if tool.effect != "read"}
    changes = any(action["name"] in writes for action in actions)
    if not (contains or assertions or (judged and (changes or "ACTION" in judged))):
        return "nothing is left to judge: no writing action and nothing to communicate"
    if "NL_ASSERTION" in given.basis:
        given.downgrades.append("NL_ASSERTION: not checked")
    given.downgrades += given.sources.notes
    made = given.made(actions, contains)
    shared = {"db": given.db, "initial": _initial(given)}
    wanted = [
        {
            "name": action["name"],
            "arguments": action.get("arguments") or {},
            "compare_args": action.get("compare_args"),
        }
        for action in actions
    ]
    verifier = {**shared, "basis": judged, "actions": wanted, "assertions": assertions,
                "contains": contains}  # fmt: skip
    made.world = RunningWorld(
        world_text(given.sources, "tau2_tools.py"),
        world_text(given.sources, "tau2_verify.py"),
        shared,
        verifier,
    )
    return made


def _assertions(given: _Given) -> list[dict[str, Any]]:
    """Those over the agent's side of the world."""
    found = given.criteria.get("env_assertions") or []
    if "ENV_ASSERTION" not in given.basis:
        return []
    mine = [check for check in found if check.get("env_type", "assistant") == "assistant"]
    if len(mine) < len(found):
        given.downgrades.append("ENV_ASSERTION: those of the user's side are not checked")
    return mine


def _initial(given: _Given) -> dict[str, Any]:
    """Changed data and actions of the agent's side before the task starts."""
    state = given.task.get("initial_state") or {}
    data = state.get("initialization_data") or {}
    actions = state.get("initialization_actions") or []
    mine = [action for action in actions if action.get("env_type", "assistant") == "assistant"]
    if data.get("user_data") or len(mine) < len(actions):
        given.downgrades.append("initial_state: the user's side has no world")
    if state.get("message_history"):
        given.downgrades.append("initial_state: its messages are not replayed")
    return {"data": data.get("agent_data") or {}, "actions": mine}


def _recorded(given: _Given) -> RecordedTask | str:
    """Reads look into db.json, other calls are only compared."""
    given.downgrades.append(f"tools.py does not run in a box: {'; '.join(given.sources.missing)}")
    actions, contains = given.actions(), given.contains()
    if (problem := given.unknown(actions)) is not None:
        return problem
    effects = {tool.name: tool.effect for tool in given.tools}
    needed = (
        actions if "ACTION" in given.basis else [a for a in actions if effects[a["name"]] != "read"]
    )
    if "DB" in given.basis:
        given.downgrades.append("DB: the writing calls are compared instead of the end state")
    for item in sorted(set(given.basis) & {"ENV_ASSERTION", "NL_ASSERTION"}):
        given.downgrades.append(f"{item}: not checked")
    if not needed and not contains:
        return "nothing is left to judge: no writing action and nothing to communicate"
    if given.task.get("initial_state"):
        given.downgrades.append("initial_state: its messages and actions are not replayed")
    made = given.made(actions, contains)
    if len(json.dumps(given.db)) <= MAX_DB_BYTES:
        made.db = given.db
    else:
        given.downgrades.append("db.json is larger than a box takes: reads answer nothing")
    made.calls = [_wanted(action) for action in needed]
    return made


def _wanted(action: dict[str, Any]) -> dict[str, Any]:
    arguments = action.get("arguments") or {}
    compared = action.get("compare_args")
    keys = arguments if compared is None else [key for key in compared if key in arguments]
    return {"name": action["name"], "arguments": {key: [arguments[key]] for key in keys}}


def _instruction(task: dict[str, Any], policy: str) -> str:
    scenario = (task.get("user_scenario") or {}).get("instructions") or {}
    if isinstance(scenario, str):
        parts = [scenario]
    else:
        keys = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
        parts = [str(scenario[key]) for key in keys if scenario.get(key)]
    told = "\n".join(parts) or str(task.get("ticket") or "")
    return f"{policy.strip()}\n\nA customer says:\n{told}" if policy.strip() else told


def tools_of(source: str, file: str) -> list[RecordedTool]:
    """Methods decorated with ``@is_tool(ToolType.X)``; TaskError for a file without any."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskError(f"{file}: not valid Python: {error}") from error
    tools = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            name = call.func if call else decorator
            if isinstance(name, ast.Name) and name.id == "is_tool":
                kind = call.args[0] if call and call.args else None
                effect = kind.attr if isinstance(kind, ast.Attribute) else "READ"
                tools.append(_tool(node, _EFFECTS.get(effect, "write")))
    if not tools:
        raise TaskError(f"{file}: no method decorated with @is_tool")
    return tools


def _tool(node: ast.FunctionDef, effect: str) -> RecordedTool:
    arguments = [argument for argument in node.args.args if argument.arg != "self"]
    defaults = len(node.args.defaults)
    required = [argument.arg for argument in arguments[: len(arguments) - defaults]]
    text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
    schema = {
        "type": "object",
        "properties": {argument.arg: _type(argument.annotation) for argument in arguments},
        "required": required,
        "additionalProperties": False,
    }
    return RecordedTool(node.name, text, schema, effect)


def _type(node: ast.expr | None) -> dict[str, Any]:
    """JSON Schema of an annotation; what is not known accepts anything."""
    match node:
        case ast.Name(id=name) if name in _SCALARS:
            return {"type": _SCALARS[name]}
        case ast.Name(id="list" | "List"):
            return {"type": "array"}
        case ast.Name(id="dict" | "Dict") | ast.Subscript(value=ast.Name(id="dict" | "Dict")):
            return {"type": "object"}
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=item):
            return {"type": "array", "items": _type(item)}
        case ast.Subscript(value=ast.Name(id="Optional"), slice=item):
            return {"anyOf": [_type(item), {"type": "null"}]}
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=parts)):
            return {"enum": [part.value for part in parts if isinstance(part, ast.Constant)]}
    return {}
