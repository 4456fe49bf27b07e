"""A calendar as an MCP server over stdio (one JSON-RPC message a line), standard library only.

The state is state.json beside this file. Hours are 9 to 16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

STATE = Path(__file__).parent / "state.json"
DAY = {"type": "string", "enum": ["mon", "tue", "wed", "thu", "fri"]}
TOOLS = [
    {
        "name": "list_events",
        "description": "Events of a day in order.",
        "inputSchema": {"type": "object", "properties": {"day": DAY}, "required": ["day"]},
        "annotations": {"readOnlyHint": True},
    },
    {
        "name": "add_event",
        "description": "Put an event of one hour into a free hour.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "day": DAY,
                "hour": {"type": "integer", "minimum": 9, "maximum": 16},
                "title": {"type": "string"},
            },
            "required": ["day", "hour", "title"],
        },
        "annotations": {"readOnlyHint": False, "destructiveHint": False},
    },
]


def call(name: str, arguments: dict) -> str:
    """Result of a tool; ValueError is told to the client."""
    events = json.loads(STATE.read_text())["events"]
    if name == "list_events":
        mine = sorted((e["hour"], e["title"]) for e in events if e["day"] == arguments["day"])
        return "\n".join(f"{hour}:00 {title}" for hour, title in mine) or "no events"
    if name == "add_event":
        if any((e["day"], e["hour"]) == (arguments["day"], arguments["hour"]) for e in events):
            raise ValueError("that hour is taken")
        events.append({key: arguments[key] for key in ("day", "hour", "title")})
        STATE.write_text(json.dumps({"events": events}))
        return "added"
    raise ValueError(f"unknown tool {name}")


def answer(method: str, params: dict) -> dict:
    """Result of a request."""
    if method == "initialize":
        return {
            "protocolVersion": params.get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "calendar", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        try:
            text, failed = call(params["name"], params.get("arguments", {})), False
        except (ValueError, KeyError) as error:
            text, failed = str(error), True
        return {"content": [{"type": "text", "text": text}], "isError": failed}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
