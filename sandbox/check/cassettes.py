"""Declared cassettes exist, can be read and hold every upstream call of the oracle (offline)."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from sandbox.calls.decode import decode
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError
from sandbox.check.findings import Step
from sandbox.check.scripts import Script
from sandbox.manifest.reading import read_toml
from sandbox.task import TaskSpec

_PATH = re.compile(r"cassettes/[\w./-]+")
_MODES = ("replay", "record")
_TOOL_KEYS = ("tool", "python", "mcp", "name")
"""Where records name the tool: ours, the proxy's (sandbox.proxy.cassette), others'."""


def check_cassettes(folder: Path, spec: TaskSpec, oracle: Script) -> Step:
    """Skipped when the task declares no replay and has no cassettes."""
    step = Step("cassettes")
    parl = read_toml(folder / "task.toml").get("metadata", {}).get("parl", {})
    replayed = _replayed_tools(parl, spec)
    named = sorted(_named(folder, parl))
    files = sorted(path for path in (folder / "cassettes").rglob("*") if path.is_file())
    for name in named:
        if not (folder / name).exists():
            step.add("missing-cassette", name, "is named but not in the task; record it and add it")
    if replayed and not files:
        step.add(
            "missing-cassette",
            "cassettes/",
            f"{', '.join(sorted(replayed))} replay recorded traffic, but there is none; run the "
            "oracle in mode record and keep the cassettes",
        )
    if not (replayed or named or files):
        step.skipped, step.note = True, "no tool replays recorded traffic"
        return step
    records = [record for path in files for record in _records(folder, path, step)]
    if files and replayed:
        _coverage(spec, oracle, replayed, records, step)
    step.note = step.note or f"{len(records)} records in {len(files)} files"
    return step


def _replayed_tools(parl: dict[str, Any], spec: TaskSpec) -> set[str]:
    """Tools that a manifest puts behind a proxy in a mode that needs cassettes."""
    if spec.proxy is not None:
        return {tool for tool, mode in spec.proxy.modes.items() if mode in _MODES}
    found: set[str] = set()
    names = [tool.name for tool in spec.tools]
    proxy = parl.get("proxy", {})
    upstreams = proxy.get("upstreams", {}) if isinstance(proxy, dict) else {}
    tables = [proxy, *upstreams.values()] if isinstance(upstreams, dict) else [proxy]
    for table in tables:
        if _wants_cassette(table):
            listed = table.get("include") or table.get("tools")
            found.update(listed if isinstance(listed, list | dict) else names)
    for section in (proxy.get("tools") if isinstance(proxy, dict) else None, parl.get("tools")):
        if isinstance(section, dict):
            found.update(
                name
                for name, table in section.items()
                if isinstance(table, dict)
                and (_wants_cassette(table) or _wants_cassette(table.get("proxy")))
            )
    return found


def _wants_cassette(table: Any) -> bool:
    return isinstance(table, dict) and (
        table.get("mode", table.get("default_mode")) in _MODES
        or bool(table.get("cassette") or table.get("cassettes"))
    )


def _named(folder: Path, parl: dict[str, Any]) -> set[str]:
    """Paths ``cassettes/...`` in the manifest and in string literals of tools.py."""
    texts = [json.dumps(parl)]
    tools = folder / "tools" / "tools.py"
    if tools.is_file():
        # it parses: what does not is no task, and is never checked this far
        texts += [
            node.value
            for node in ast.walk(ast.parse(tools.read_text("utf-8", "replace")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    found = {match.rstrip("/.") for text in texts for match in _PATH.findall(text)}
    for table in _tables(parl):
        name = table.get("cassette")
        if isinstance(name, str):
            found.add(name if "/" in name else f"cassettes/{name}")
    return found


def _tables(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(table for inner in value.values() for table in _tables(inner))]
    return []


def _records(folder: Path, path: Path, step: Step) -> list[dict[str, Any]]:
    """Records of a JSON or JSON-lines file; an unreadable or empty one is a finding."""
    name = path.relative_to(folder).as_posix()
    text = path.read_text("utf-8", "replace")
    if not text.strip():
        step.add("incomplete-cassette", name, "is empty; record it again")
        return []
    try:
        values = [json.loads(text)]
    except ValueError:  # JSON lines, each of them judged on its own
        values = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                values.append(json.loads(line))
            except ValueError as error:
                step.add("incomplete-cassette", f"{name}:{number}", f"is not JSON: {error}")
    found: list[dict[str, Any]] = []
    for value in values:
        inner = value
        if isinstance(value, dict):
            inner = value.get("records", value.get("interactions", [value]))
        found += [item for item in inner if isinstance(item, dict)] if isinstance(
            inner, list) else []  # fmt: skip
    if not found:
        step.add("incomplete-cassette", name, "holds no record; record it again")
    return found


def _coverage(
    spec: TaskSpec, oracle: Script, replayed: set[str], records: list[dict[str, Any]], step: Step
) -> None:
    known: set[tuple[str, str]] = set()
    loose: set[str] = set()
    for number, record in enumerate(records, start=1):
        tool = _tool_of(record)
        if tool is None:
            continue
        arguments = _arguments_of(record)
        if isinstance(arguments, str):
            step.add(
                "incomplete-cassette",
                f"cassettes/: record {number} ({tool})",
                f"its arguments are not JSON, so it answers no call: {arguments[:120]!r}",
            )
        elif arguments is None:
            loose.add(tool)
        else:
            known.add((tool, _canonical(arguments)))
    if records and not any(map(_tool_of, records)):
        # the proxy keys HTTP exchanges by request: a call they miss fails when it is played, and
        # missed_calls() and the step "oracle" say so
        if not all("key" in record or record.get("kind") == "tools" for record in records):
            step.add(
                "cassette-not-compared",
                "cassettes/",
                f"none of its {len(records)} records names a tool or a request's key, so nothing "
                "says that they answer the solution's calls",
                "warning",
            )
        step.note = "records name no tool: only played, not compared"
        return
    for tool in sorted(loose & replayed):
        step.add(
            "cassette-not-compared",
            f"cassettes/: {tool}",
            "its records do not tell the arguments, so they count for any call of it; record it "
            "again with arguments",
            "warning",
        )
    table = ToolTable(spec.tools, spec.forbidden_tools)
    for calls in oracle.rounds:
        for call in calls:
            decoded = decode(call, table)
            if isinstance(decoded, CallError):  # the step "oracle" shows that it fails
                continue
            if decoded.tool not in replayed or decoded.tool in loose:
                continue
            wanted = _canonical(decoded.arguments)
            if (decoded.tool, wanted) not in known:
                step.add(
                    "incomplete-cassette",
                    f"cassettes/: {decoded.tool}",
                    f"no record answers the oracle's call {wanted[:120]}; record it",
                )


def _tool_of(record: dict[str, Any]) -> str | None:
    """The tool that a record names, or None (a list of tools, a plain HTTP exchange)."""
    names = [table.get(key) for table in _places(record) for key in _TOOL_KEYS]
    return next((name for name in names if isinstance(name, str)), None)


def _arguments_of(record: dict[str, Any]) -> dict[str, Any] | str | None:
    """A record's arguments; what is no JSON object comes back as text; None: it has none."""
    broken: str | None = None
    for table in _places(record):
        for name in ("arguments", "args", "canonical_args", "params"):
            value = table.get(name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except ValueError:  # told by the caller, unless another place holds them
                    broken = value
            if isinstance(value, dict):
                return value
            if value is not None:
                broken = value if isinstance(value, str) else json.dumps(value)
    return broken


def _places(record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    request = record.get("request")
    return record, request if isinstance(request, dict) else {}


def _canonical(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def missed_calls(observations: list[str], step: Step) -> None:
    """A replay that missed while the oracle played."""
    for text in observations:
        if "CASSETTE_MISS" in text or "cassette_miss" in text:
            step.add(
                "incomplete-cassette", "oracle", f"a call was not on the cassette: {text[:160]}"
            )
