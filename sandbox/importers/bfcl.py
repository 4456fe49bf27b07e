"""BFCL JSONL: ``{id, question, function}`` and ``{id, ground_truth}`` (single-turn categories).

The answers are in ``ground_truth`` of the row or in ``possible_answer/NAME`` beside the file.
Types there are not JSON Schema's: dict, float, tuple, any (facts/sandboxes.md 1.1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox.importers.base import ImportResult, read_jsonl
from sandbox.importers.recorded import RecordedTask, RecordedTool, task_name, write_recorded

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "double": "number",
          "hashmap": "object", "arraylist": "array", "bool": "boolean", "int": "integer",
          "long": "integer", "char": "string", "byte": "integer", "short": "integer"}  # fmt: skip


def import_bfcl(source: Path, dest: Path, limit: int) -> ImportResult:
    """One task a row; TaskError when the file cannot be read."""
    result = ImportResult()
    answers = _answers(source, result.skipped)
    for number, row in read_jsonl(source, result.skipped):
        if limit and len(result.tasks) >= limit:
            break
        key = str(row.get("id", f"line-{number}"))
        truth = row.get("ground_truth", answers.get(key))
        problem = _problem(row, truth)
        if problem is not None or not isinstance(truth, list):
            result.skipped.append(f"{source.name}:{number} {key}: {problem}")
            continue
        result.tasks.append(write_recorded(_task(key, row, truth), dest))
    return result


def _answers(source: Path, skipped: list[str]) -> dict[str, Any]:
    path = source.parent / "possible_answer" / source.name
    if not path.is_file():
        return {}
    bad: list[str] = []
    rows = read_jsonl(path, bad)
    skipped += [f"possible_answer/{line}" for line in bad]
    return {str(row.get("id")): row.get("ground_truth") for _, row in rows}


def _problem(row: dict[str, Any], truth: Any) -> str | None:
    if "involved_classes" in row or "initial_config" in row:
        return "a multi-turn row runs BFCL's own Python classes, which PARL does not bring"
    if not isinstance(truth, list) or not truth:
        return "no ground_truth: doing nothing would be right, so there is no reward to learn from"
    if not all(isinstance(call, dict) and len(call) == 1 for call in truth):
        return "ground_truth is not a list of {function: {argument: [accepted values]}}"
    if not isinstance(row.get("function"), list) or not isinstance(row.get("question"), list):
        return "question or function is missing"
    return None


def _task(key: str, row: dict[str, Any], truth: list[dict[str, Any]]) -> RecordedTask:
    downgrades: list[str] = []
    tools = [
        RecordedTool(
            name=entry["name"],
            description=entry.get("description", ""),
            schema=_schema(entry.get("parameters", {}), entry["name"], downgrades),
        )
        for entry in row["function"]
    ]
    turns = row["question"]
    messages = turns[0] if turns and isinstance(turns[0], list) else turns
    if len(turns) > 1 and isinstance(turns[0], list):
        downgrades.append(f"question: only the first of {len(turns)} turns is asked")
    calls = [
        {"name": name, "arguments": arguments, "closed": True}
        for call in truth
        for name, arguments in call.items()
    ]
    script = [
        {"name": call["name"], "arguments": {
            argument: _first(accepted)
            for argument, accepted in call["arguments"].items()
            if "" not in accepted
        }}
        for call in calls
    ]  # fmt: skip
    return RecordedTask(
        name=task_name("bfcl", key),
        task_type=f"bfcl/{key.rsplit('_', 1)[0]}".replace("/", "-"),
        source="bfcl",
        instruction="\n\n".join(str(message.get("content", "")) for message in messages),
        tools=tools,
        calls=calls,
        script=script,
        downgrades=downgrades,
    )


def _first(accepted: Any) -> Any:
    """A value that the list accepts; the fields of an object hold lists of their own."""
    value = accepted[0] if isinstance(accepted, list) and accepted else accepted
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _plain(next((choice for choice in choices if choice != ""), ""))
            if isinstance(choices, list)
            else _plain(choices)
            for key, choices in value.items()
            if not (isinstance(choices, list) and "" in choices)
        }
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _schema(schema: dict[str, Any], tool: str, downgrades: list[str]) -> dict[str, Any]:
    """BFCL's types as JSON Schema, recursively; keys beside the standard ones are left out."""
    result: dict[str, Any] = {}
    kind = str(schema.get("type", "")).lower()
    if kind and kind != "any":
        result["type"] = _TYPES.get(kind, kind)
        if result["type"] not in ("object", "array", "string", "number", "integer", "boolean"):
            downgrades.append(f"tool {tool}: type {kind!r} is accepted as anything")
            del result["type"]
    for key in ("description", "enum", "default", "minimum", "maximum"):
        if key in schema and schema[key] is not None:
            result[key] = schema[key]
    if isinstance(schema.get("properties"), dict):
        result["properties"] = {
            key: _schema(inner, tool, downgrades) for key, inner in schema["properties"].items()
        }
        result["required"] = [
            key for key in schema.get("required", []) if key in result["properties"]
        ]
        result["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        result["items"] = _schema(schema["items"], tool, downgrades)
    return result
