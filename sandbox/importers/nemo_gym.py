"""NeMo-Gym JSONL: ``{responses_create_params: {input, tools}, verifier_metadata}``.

The tools of a row are served by a resources server that a row does not bring, and so is its
verifier; what can be judged from the row itself is imported: an expected answer or expected calls,
in verifier_metadata or beside responses_create_params.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sandbox.importers.base import ImportResult, read_jsonl
from sandbox.importers.recorded import RecordedTask, RecordedTool, task_name, write_recorded

_ANSWER_KEYS = ("expected_answer", "ground_truth", "answer", "expected")
_ROW_KEYS = frozenset({"id", "responses_create_params", "verifier_metadata"})
_CALL_KEYS = ("expected_calls", "expected_tool_calls", "ground_truth", "tool_calls")


def import_nemo_gym(source: Path, dest: Path, limit: int) -> ImportResult:
    """One task a row; TaskError when the file cannot be read."""
    result = ImportResult()
    for number, row in read_jsonl(source, result.skipped):
        if limit and len(result.tasks) >= limit:
            break
        task = _task(source.stem, number, row)
        if isinstance(task, str):
            result.skipped.append(f"{source.name}:{number}: {task}")
        else:
            result.tasks.append(write_recorded(task, dest))
    return result


def _task(stem: str, number: int, row: dict[str, Any]) -> RecordedTask | str:
    params = row.get("responses_create_params")
    given = row.get("verifier_metadata") or {}
    if not isinstance(params, dict) or not isinstance(given, dict):
        return "no responses_create_params, or verifier_metadata is no object"
    # what a resources server reads stands in verifier_metadata in some rows, beside it in others
    beside = {key: value for key, value in row.items() if key not in _ROW_KEYS}
    metadata = {**beside, **given}
    downgrades = ["verifier: the resources server's /verify is replaced by a comparison"]
    answer_key = next((key for key in _ANSWER_KEYS if _answer(metadata.get(key)) is not None), None)
    answer = None if answer_key is None else _answer(metadata[answer_key])
    calls_key = next((key for key in _CALL_KEYS if isinstance(metadata.get(key), list)
                      and key != answer_key), None)  # fmt: skip
    listed = [] if calls_key is None else metadata[calls_key]
    calls = [call for call in map(_call, listed) if call is not None]
    if answer is None and not calls:
        return (
            f"verifier_metadata and the row have keys {sorted(metadata)}; only an expected answer "
            f"({', '.join(_ANSWER_KEYS)}) or expected calls can be judged without its server"
        )
    if calls and len(calls) < len(listed):
        return f"{calls_key}: {len(listed) - len(calls)} of {len(listed)} calls cannot be read"
    used = {answer_key, calls_key if calls else None, "category"}
    for key in sorted(set(metadata) - used):
        place = "verifier_metadata." if key in given else ""
        downgrades.append(f"{place}{key}: not used; what it asks for is not checked")
    tools = _tools(params.get("tools") or [])
    if isinstance(tools, str):
        return tools
    if not tools:
        tools = [RecordedTool("note", "Write a note to yourself.", _NOTE)]
        downgrades.append("the row has no tools: a notebook stands in")
    for key in sorted(set(params) - {"input", "tools"}):
        downgrades.append(f"responses_create_params.{key} is a matter of the run")
    instruction = _instruction(params.get("input"))
    if not instruction.strip():
        return "responses_create_params.input holds no text"
    return RecordedTask(
        name=task_name("nemo-gym", str(row.get("id", f"{stem}-{number}"))),
        task_type=str(metadata.get("category") or stem),
        source="nemo-gym",
        instruction=instruction,
        tools=tools,
        calls=[
            {"name": call["name"],
             "arguments": {key: [value] for key, value in call["arguments"].items()}}
            for call in calls
        ],
        exact=bool(calls),
        answer=answer,
        script=calls,
        final_text="done" if answer is None else answer,
        downgrades=downgrades,
    )  # fmt: skip


def _answer(value: Any) -> str | None:
    """The one answer that a value holds, as text."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def _tools(given: Any) -> list[RecordedTool] | str:
    """The functions, in the form of the Responses or of the Chat API; or what is wrong."""
    if not isinstance(given, list):
        return "responses_create_params.tools: expected a list"
    tools = []
    for entry in given:
        if not isinstance(entry, dict) or entry.get("type", "function") != "function":
            continue
        tool = entry.get("function", entry)
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            return f"a tool has no name: {json.dumps(entry)[:80]}"
        schema = tool.get("parameters") or {"type": "object"}
        if not isinstance(schema, dict):
            return f"tool {tool['name']}: parameters: expected a JSON Schema"
        tools.append(RecordedTool(tool["name"], str(tool.get("description") or ""), schema))
    return tools


_NOTE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def _instruction(given: Any) -> str:
    if isinstance(given, str):
        return given
    texts = []
    for message in given if isinstance(given, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part.get("text", "") for part in content if isinstance(part, dict)]
            content = "\n".join(str(part) for part in parts)
        texts.append(content if isinstance(content, str) else "")
    return "\n\n".join(text for text in texts if text)


def _call(entry: Any) -> dict[str, Any] | None:
    """{name, arguments} of an OpenAI-like call."""
    if not isinstance(entry, dict):
        return None
    inner = entry.get("function", entry)
    if not isinstance(inner, dict):
        return None
    name, arguments = inner.get("name"), inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": arguments}
