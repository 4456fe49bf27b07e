"""Tools over an MCP server of this task, which runs inside the box (environment/files)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Literal

from sandbox.toolkit import ToolError, tool, workdir


def setup(data: dict[str, Any]) -> None:
    """Write the server and its state."""
    (workdir() / "server.py").write_text(data["files"]["server.py"])
    (workdir() / "state.json").write_text(json.dumps({"events": data["events"]}))


@tool(effect="read", idempotent=True)
def list_events(day: Literal["mon", "tue", "wed", "thu", "fri"]) -> str:
    """Events of a day in order."""
    return _call("list_events", {"day": day})


@tool(effect="write")
def add_event(day: Literal["mon", "tue", "wed", "thu", "fri"], hour: int, title: str) -> str:
    """Put an event of one hour (9 to 16) into a free hour."""
    return _call("add_event", {"day": day, "hour": hour, "title": title})


def end_state() -> dict[str, Any]:
    """The calendar."""
    return json.loads((workdir() / "state.json").read_text())


def _call(name: str, arguments: dict[str, Any]) -> str:
    """One MCP session over stdio: initialize, then the call."""
    messages = [
        {
            "jsonrpc": "2.0",
            "id": 0,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "parl", "version": "1"},
            },
        },
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": name, "arguments": arguments},
        },
    ]
    done = subprocess.run(
        [sys.executable, "-I", "server.py"],
        cwd=workdir(),
        input="".join(json.dumps(message) + "\n" for message in messages),
        capture_output=True,
        text=True,
        timeout=8,
        check=False,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    result = next((reply["result"] for reply in replies if reply.get("id") == 1), None)
    if result is None:
        raise ToolError(f"the MCP server ended: {done.stderr[-200:]}")
    text = "".join(part["text"] for part in result["content"])
    if result["isError"]:
        raise ToolError(text)
    return text
