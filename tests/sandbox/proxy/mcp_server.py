"""A real MCP server made with the SDK: ``python mcp_server.py [http PORT]``."""

import os
import subprocess
import sys
import time
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("notes")
notes: list[str] = []


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_notes() -> list[str]:
    """All notes."""
    return notes


@server.tool(annotations=ToolAnnotations(destructive_hint=False))
def add_note(text: str) -> str:
    """Add a note."""
    notes.append(text)
    return f"note {len(notes)}"


@server.tool()
def refuse() -> str:
    """Always fails."""
    raise ToolError("no such note")


@server.tool()
def picture() -> Any:
    """An image."""
    return ["see:", Image(data=b"\x89PNG", format="png")]


@server.tool()
def environment(name: str) -> str:
    """A variable of the server's environment."""
    sys.stderr.write(f"asked for {name}: {os.environ.get(name)}\n")
    return os.environ.get(name, "(unset)")


@server.tool()
def wait(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def die() -> str:
    """End the process without an answer."""
    os._exit(3)


@server.tool()
def spawn() -> list[int]:
    """Start a child and a daemon in a session of its own; their process ids."""
    child = subprocess.Popen(["sleep", "600"])
    daemon = subprocess.Popen(
        ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert daemon.stdout is not None
    return [os.getpid(), child.pid, int(daemon.stdout.readline())]


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
