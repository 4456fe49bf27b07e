"""tau2-bench domains: ``tasks.json``, ``db.json``, ``policy.md``, ``tools.py`` of one folder.

tools.py is read, never run: it needs tau2's own classes. Reads answer from db.json; writes are
recorded and compared with the task's actions, which stands for its data base check.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

from sandbox.errors import TaskError
from sandbox.importers.base import ImportResult, read_text
from sandbox.importers.recorded import RecordedTask, RecordedTool, task_name, write_recorded

_EFFECTS = {"READ": "read", "WRITE": "write", "THINK": "read", "GENERIC": "read"}
_SCALARS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
MAX_DB_BYTES = 2 << 20


def import_tau2(source: Path, dest: Path, limit: int) -> ImportResult:
    """``source`` is the domain's folder; TaskError when one of its files cannot be read."""
    tasks = _json(source / "tasks.json")
    tasks = tasks.get("tasks", []) if isinstance(tasks, dict) else tasks
    db = _json(source / "db.json")
    policy = read_text(source / "policy.md") if (source / "policy.md").exists() else ""
    tools = tools_of(read_text(source / "tools.py"), str(source / "tools.py"))
    result = ImportResult()
    for task in tasks:
        if limit and len(result.tasks) >= limit:
            break
        made = _task(source.resolve().name, task, db, policy, tools)
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


def _task(
    domain: str, task: dict[str, Any], db: dict[str, Any], policy: str, tools: list[RecordedTool]
) -> RecordedTask | str:
    criteria = task.get("evaluation_criteria") or {}
    basis = [str(item) for item in criteria.get("reward_basis") or ["DB", "COMMUNICATE"]]
    downgrades = ["user simulator: the scenario is told in the instruction instead"]
    effects = {tool.name: tool.effect for tool in tools}
    actions = [
        action for action in criteria.get("actions") or []
        if action.get("requestor", "assistant") == "assistant"
    ]  # fmt: skip
    if len(actions) < len(criteria.get("actions") or []):
        downgrades.append("actions of the user are not asked for")
    unknown = sorted({action["name"] for action in actions} - set(effects))
    if unknown:
        return f"its actions name {', '.join(unknown)}, which tools.py does not define"
    needed = actions if "ACTION" in basis else [a for a in actions if effects[a["name"]] != "read"]
    if "DB" in basis:
        downgrades.append("DB: the writing calls are compared instead of the end state")
    for item in sorted(set(basis) & {"ENV_ASSERTION", "NL_ASSERTION"}):
        downgrades.append(f"{item}: not checked")
    contains = [str(text) for text in criteria.get("communicate_info") or []]
    contains = contains if "COMMUNICATE" in basis else []
    if not needed and not contains:
        return "nothing is left to judge: no writing action and nothing to communicate"
    if task.get("initial_state"):
        downgrades.append("initial_state: its messages and actions are not replayed")
    if len(json.dumps(db)) > MAX_DB_BYTES:
        db = {}
        downgrades.append("db.json is larger than a box takes: reads answer nothing")
    return RecordedTask(
        name=task_name(f"tau2-{domain}", str(task.get("id"))),
        task_type=f"tau2-{domain}",
        source="tau2-bench",
        instruction=_instruction(task, policy),
        tools=[RecordedTool(t.name, t.description, t.schema, t.effect) for t in tools],
        calls=[_wanted(action) for action in needed],
        exact=False,
        contains=contains,
        script=[{"name": a["name"], "arguments": a.get("arguments") or {}} for a in actions],
        final_text="; ".join(contains) or "done",
        db=db,
        downgrades=downgrades,
    )


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
