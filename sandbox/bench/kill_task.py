"""The task that the victims of ``kill_leaks`` play.

One tool lives in the box, one is a simulator and one an MCP server over stdio, both behind the
proxy; each leaves daemons, files and open calls. The right answer is always "done".
"""

from __future__ import annotations

import json
from pathlib import Path

from sandbox.backends.interpreter import find_interpreter

ROLE_VARIABLE = "PARL_KILL_ROLE"
"""In the environment of an MCP server: ``mark_of`` those whose episodes it serves."""
STATE_FILE = "state-of-"
"""A file of this name and a role is in every place where an episode keeps something."""

_TOOLS = '''
import os, subprocess, time
from sandbox.toolkit import tool, workdir

@tool(effect="write")
def misbehave(seconds: float) -> str:
    """Leave a daemon and a file, then wait.

    Args:
        seconds: how long to wait
    """
    subprocess.Popen(["setsid", "sleep", "600"])
    (workdir() / f"{time.monotonic()}").write_text("left")
    time.sleep(seconds)
    return "done"
'''
_SIMULATOR = '''
import random, subprocess, tempfile, time
from sandbox.toolkit import tool, workdir

@tool(effect="write")
def take(count: int) -> str:
    """Leave a daemon now and then, a file and a folder; then wait.

    Args:
        count: how many
    """
    if random.random() < 0.2:
        subprocess.Popen(["setsid", "sleep", "600"])
    (workdir() / "STATE").write_text("left")
    tempfile.mkdtemp()
    time.sleep(random.uniform(0, 0.3))
    return f"took {count}"
'''
_NOTES = '''
from sandbox.toolkit import tool

@tool(effect="write")
def note(text: str) -> str:
    """Write a note.

    Args:
        text: what to write
    """
    return "noted"
'''
"""What the MCP server offers, for those who list the tools without it."""
_MCP_SERVER = """
import json, random, subprocess, sys, tempfile, time
tool = {"name": "note", "description": "Write a note.",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}},
                        "required": ["text"]}}
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "initialize":
        answer["result"] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                            "serverInfo": {"name": "notes", "version": "1"}}
    elif message["method"] == "tools/list":
        answer["result"] = {"tools": [tool]}
    elif message["method"] == "tools/call":
        subprocess.Popen(["setsid", "sleep", "600"], stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL)
        tempfile.NamedTemporaryFile(suffix="STATE", delete=False).write(b"left")
        time.sleep(random.uniform(0, 0.3))
        answer["result"] = {"content": [{"type": "text", "text": "noted"}]}
    else:
        answer["error"] = {"code": -32601, "message": "no"}
    print(json.dumps(answer), flush=True)
"""
_VERIFY = """
def verify(final_text, end_state, data):
    return {"correctness": float(final_text == data["answer"])}
"""
_MANIFEST = """
schema_version = "1.4"
[task]
name = "parl/kill-leaks"
[metadata.parl]
task_type = "kill_leaks"
[metadata.parl.budget]
call_timeout_s = 30
[metadata.parl.proxy.upstreams.stock]
kind = "python"
source = "tools/stock.py"
[metadata.parl.proxy.upstreams.notes]
kind = "mcp"
mode = "live"
simulator = "tools/notes.py"
command = {command}
args = ["-I", "-S", "-c", {server}]
env = {{{variable} = "{mark}"}}
tools.note = {{effect = "write"}}
"""


def mark_of(round_folder: Path, role: str) -> str:
    """Names a role of one round."""
    return f"{round_folder.name}-{role}"


def write_task(folder: Path, role: str) -> Path:
    """The task folder of one victim, inside the round's; what its tools leave carries the role."""
    state = STATE_FILE + role
    files = {
        "task.toml": _MANIFEST.format(
            command=json.dumps(str(find_interpreter().path)),
            server=json.dumps(_MCP_SERVER.replace("STATE", state)),
            variable=ROLE_VARIABLE,
            mark=mark_of(folder.parent, role),
        ),
        "instruction.md": "Use every tool, then answer done.",
        "tools/tools.py": _TOOLS,
        "tools/stock.py": _SIMULATOR.replace("STATE", state),
        "tools/notes.py": _NOTES,
        "tests/verify.py": _VERIFY,
        "tests/data.json": json.dumps({"answer": "done"}),
        "solution/calls.jsonl": json.dumps({"final_text": "done"}) + "\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
