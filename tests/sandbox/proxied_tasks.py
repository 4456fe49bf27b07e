"""Task folders whose tools the proxy serves, and a pool to play them in."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandbox.backends.base import Level
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.session import Observation, RawCall
from sandbox.task import TaskSpec, load_task
from sandbox.tool_session import ToolSession
from tests.sandbox.conftest import need
from tests.sandbox.proxy.api import ApiServer

SERVER = Path(__file__).parent / "proxy" / "mcp_server.py"
WEATHER = RawCall("functions.weather:0", '{"city": "Oslo"}')

TASK = """
schema_version = "1.4"
[task]
name = "acme/proxied"
[metadata.parl]
task_type = "proxied"
[metadata.parl.budget]
call_timeout_s = 20
"""
TOOLS = '''
from sandbox.toolkit import tool

@tool(effect="read")
def double(number: int) -> str:
    """Twice the number."""
    return str(2 * number)
'''
QUESTION = "Add the item bolt, then tell twice the temperature in Oslo as in: 8 degrees."
ANSWER = "42 degrees"
"""Not a word that a random agent may guess: the check would say so."""
VERIFY = """
def verify(final_text, end_state, data):
    return {"correctness": float(final_text.strip() == data["answer"])}
"""
SIMULATOR = '''
from sandbox.toolkit import ToolError, tool

stock = {}

def setup(data):
    stock.update(data["stock"])

@tool(effect="write")
def take(name: str, count: int) -> dict:
    """Take goods from the stock."""
    if stock[name] < count:
        raise ToolError(f"only {stock[name]} {name} left")
    stock[name] -= count
    return {"left": stock[name]}
'''


SIMULATED = '\n[metadata.parl.proxy.upstreams.stock]\nkind = "python"\nsource = "tools/stock.py"\n'


def simulated(folder: Path) -> Path:
    """A task whose tool "take" is a simulator."""
    write_task(folder, SIMULATED)
    (folder / "tools" / "stock.py").write_text(SIMULATOR)
    return folder


def write_task(folder: Path, proxy: str, calls: list[dict[str, Any]] | None = None) -> Path:
    """A task folder with one tool in the box and what ``proxy`` (TOML) declares beside it."""
    files = {
        "task.toml": TASK + proxy,
        "instruction.md": QUESTION,
        "tools/tools.py": TOOLS,
        "tests/verify.py": VERIFY,
        "tests/data.json": json.dumps({"answer": ANSWER}),
        "environment/data.json": json.dumps({"stock": {"bolt": 3}}),
        "solution/calls.jsonl": "".join(
            json.dumps(line) + "\n" for line in [*(calls or []), {"final_text": ANSWER}]
        ),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


CALLS = [
    {"name": "weather", "arguments": {"city": "Oslo"}},
    {"name": "add_item", "arguments": {"name": "bolt"}},
    {"name": "double", "arguments": {"number": 21}},
]


def api_task(folder: Path, api: ApiServer, extra: str = "", mode: str = "replay") -> Path:
    """weather, add_item, list_items, fail, drop and status of the test API behind the proxy."""
    proxy = f"""
[metadata.parl.proxy.upstreams.api]
kind = "openapi"
document = "tools/openapi.json"
cassette = "cassettes/api.jsonl"
mode = "{mode}"
include = ["weather", "add_item", "list_items", "status", "drop"]
{extra}
"""
    write_task(folder, proxy, CALLS)
    api.write_document(folder / "tools")
    return folder


def operator(folder: Path, api: ApiServer) -> Path:
    """proxy.toml of a node that may reach the test API."""
    path = folder / "proxy.toml"
    path.write_text(
        f'state_dir = "{folder / "state"}"\nretry = {{backoff_s = 0.01, max_attempts = 2}}\n'
        f'network = {{allow_addresses = ["127.0.0.1:{api.port}"]}}\n'
    )
    return path


def config(**changes: Any) -> SandboxConfig:
    need(Level.A)
    return SandboxConfig.model_validate({"level": "A", **changes})


Body = Callable[[SandboxPool, TaskSpec], Awaitable[Any]]


def in_pool(folder: Path, settings: SandboxConfig, body: Body) -> Any:
    """Run ``await body(pool, spec)`` with one box."""

    async def go() -> Any:
        loaded = load_task(folder)
        pool = SandboxPool(loaded.bundle, size=1, leases=MemoryLeases(), config=settings)
        await pool.start()
        try:
            return await body(pool, loaded.spec)
        finally:
            await pool.close()

    return asyncio.run(go())


async def play(session: ToolSession, *calls: RawCall) -> list[Observation]:
    """Start, call until something stops it."""
    assert (await session.start()).stop is None
    seen: list[Observation] = []
    for call in calls:
        seen.append(await session.call(call))
        if seen[-1].stop is not None:
            break
    return seen


def raw(tool: str, **arguments: Any) -> RawCall:
    return RawCall(tool, json.dumps(arguments))


def audit(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*/audit.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
