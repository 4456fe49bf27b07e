"""MCP servers, real ones: over stdio and over streamable HTTP."""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.ports import free_port
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.errors import McpFailed, ProxyError
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from tests.sandbox.proxy.conftest import with_proxy

SERVER = Path(__file__).with_name("mcp_server.py")
NOTES = {"list_notes": {"effect": "read"}, "add_note": {"effect": "write"}}


def config(folder: Path, upstream: dict[str, Any], **node: Any) -> ProxyConfig:
    base = {"kind": "mcp", "mode": "live", "tools": NOTES}
    if "url" not in upstream:
        base = {**base, "command": sys.executable, "args": [SERVER.name], "cwd": str(SERVER.parent)}
    return ProxyConfig.model_validate(
        {
            "state_dir": str(folder / "state"),
            "retry": {"backoff_s": 0.01},
            "worlds": {"w": {"upstreams": {"notes": {**base, **upstream}}}},
            **node,
        }
    )


async def play(proxy: ToolProxy, token: str, *script: tuple[str, dict[str, Any]]) -> list[Any]:
    return [await proxy.call(token, tool, arguments) for tool, arguments in script]


SCRIPT = [
    ("list_notes", {}),
    ("add_note", {"text": "买牛奶"}),
    ("list_notes", {}),
    ("refuse", {}),
    ("picture", {}),
]


def check_script(results: list[ProxyResult]) -> None:
    empty, added, listed, refused, picture = results
    assert (empty.error, empty.text) == (None, "[]") or empty.value == {"result": []}
    assert (added.text, added.outcome) == ("note 1", "done")
    assert "买牛奶" in listed.text and listed.effect == "read"
    assert (refused.error, refused.infra) == ("tool_error", False)
    assert "no such note" in refused.text
    assert picture.error is None and "[image/png refused: not text]" in picture.text


@pytest.mark.slow
def test_stdio_record_then_replay_without_the_server(tmp_path: Path) -> None:
    """Tools, effects and answers come from a real server, then from the cassette alone."""
    cassette = str(tmp_path / "c.jsonl")

    async def body(proxy: ToolProxy, token: str) -> Any:
        specs = proxy.tools(token)
        effects = {spec.name: (spec.effect, spec.idempotent) for spec in specs}
        return specs, effects, await play(proxy, token, *SCRIPT)

    recording = config(tmp_path, {"mode": "record", "cassette": cassette})
    specs, effects, recorded = with_proxy(recording, body)
    assert effects["list_notes"] == ("read", True) and effects["add_note"] == ("write", False)
    assert effects["refuse"] == ("destructive", False)
    check_script(recorded)
    offline = {"mode": "replay", "cassette": cassette, "command": "/no/such/server", "args": []}
    again, _, replayed = with_proxy(config(tmp_path, offline), body)
    assert again == specs
    assert [r.text for r in replayed] == [r.text for r in recorded]
    assert all(r.cassette_hit for r in replayed)


@pytest.mark.slow
def test_streamable_http_goes_through_the_guard(tmp_path: Path) -> None:
    """The same script; without an allowlist entry the address is refused."""
    with http_server() as port:
        upstream = {"url": f"http://127.0.0.1:{port}/mcp"}
        allowed = {"network": {"allow_addresses": [f"127.0.0.1:{port}"]}}

        async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
            return await play(proxy, token, *SCRIPT)

        check_script(with_proxy(config(tmp_path, upstream, **allowed), body))
        with pytest.raises(ProxyError):
            with_proxy(config(tmp_path, upstream), body)


@contextlib.contextmanager
def http_server() -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "http", str(port)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_episodes_have_servers_of_their_own(tmp_path: Path) -> None:
    """With session "episode" no note crosses over; with "node" they share one server."""

    async def body(proxy: ToolProxy, token: str) -> list[str]:
        other = await proxy.open_episode("f", "w")
        await proxy.call(token, "add_note", {"text": "mine"})
        seen = await proxy.call(other.token, "list_notes", {})
        return [seen.text]

    assert "mine" not in with_proxy(config(tmp_path, {"session": "episode"}), body)[0]
    assert "mine" in with_proxy(config(tmp_path / "n", {"session": "node"}), body)[0]


@pytest.mark.slow
def test_a_server_that_dies_in_a_call(tmp_path: Path) -> None:
    """The call may have run: unknown, infrastructure; the episode's state is gone and later calls
    say so. A stateless server is started again."""

    async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
        return await play(proxy, token, ("die", {}), ("list_notes", {}))

    own, after = with_proxy(config(tmp_path, {"session": "episode"}), body)
    assert (own.outcome, own.infra, own.num_attempts) == ("unknown", True, 1)
    assert (after.error, after.infra) == ("mcp_failed", True)
    shared, after = with_proxy(config(tmp_path / "n", {"session": "node"}), body)
    assert shared.outcome == "unknown" and after.error is None


@pytest.mark.slow
def test_a_server_that_hangs_or_does_not_start(tmp_path: Path) -> None:
    """Deadlines end both; the failure is typed."""

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "wait", {"seconds": 30})

    begin = time.perf_counter()
    slow = config(tmp_path, {"tools": {"wait": {"timeout_s": 0.3, "effect": "write"}}})
    assert with_proxy(slow, body).outcome == "unknown"
    for command in ("/no/such/server", "cat"):
        broken = config(tmp_path, {"command": command, "args": [], "start_timeout_s": 1})
        with pytest.raises(McpFailed):
            with_proxy(broken, body)
    assert time.perf_counter() - begin < 25


@pytest.mark.slow
def test_a_servers_secret_comes_by_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets the secret bound to its command and nothing else of our environment; what it says or
    logs of it is scrubbed."""
    monkeypatch.setenv("PARL_TEST_SECRET", "s3cr3t-value-of-mine")
    monkeypatch.setenv("PARL_TEST_OTHER", "not for servers")
    caplog.set_level(logging.DEBUG, "parl.proxy.mcp")
    command = Path(sys.executable).name
    secrets = {
        "key": {
            "env": "PARL_TEST_SECRET",
            "bind": [{"host": command, "place": "env", "name": "API_KEY"}],
        }
    }

    async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
        names = ["API_KEY", "PARL_TEST_SECRET", "PARL_TEST_OTHER"]
        return await play(proxy, token, *[("environment", {"name": name}) for name in names])

    results = with_proxy(config(tmp_path, {}, secrets=secrets), body)
    assert [result.text for result in results] == ["[secret]", "(unset)", "(unset)"]
    assert "asked for API_KEY: [secret]" in caplog.text and "s3cr3t-value" not in caplog.text


def test_http_secrets_reach_the_server_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound header is on every request of the transport."""
    monkeypatch.setenv("PARL_TEST_SECRET", "s3cr3t-value-of-mine")
    seen: list[str] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def go() -> None:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        binding = {"host": "127.0.0.1", "format": "Bearer {secret}", "allow_plain_http": True}
        node = config(
            tmp_path,
            {"url": f"http://127.0.0.1:{port}/mcp", "start_timeout_s": 5},
            secrets={"key": {"env": "PARL_TEST_SECRET", "bind": [binding]}},
            network={"allow_addresses": ["127.0.0.1"]},
        )
        proxy = ToolProxy(node)
        try:
            with pytest.raises(McpFailed) as caught:
                await proxy.start()
            assert "s3cr3t" not in str(caught.value)
        finally:
            await proxy.close()
            server.close()

    asyncio.run(go())
    assert seen and all("Bearer s3cr3t-value-of-mine" in request for request in seen)


LIGHT = """
import json, sys
tool = {"name": "t", "inputSchema": {"type": "object", "properties": {"a": {"$ref": sys.argv[1]}},
        "$defs": {"A": {"type": "integer"}}}}
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method = message["method"]
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        answer["result"] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                            "serverInfo": {"name": "x", "version": "1"}}
    elif method == "tools/list":
        answer["result"] = {"tools": [tool]}
    elif method == "tools/call":
        text = json.dumps(message["params"].get("arguments"))
        answer["result"] = {"content": [{"type": "text", "text": text}]}
    else:
        answer["error"] = {"code": -32601, "message": "no"}
    print(json.dumps(answer), flush=True)
"""


def test_a_schema_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    """A server's schema must not make the proxy fetch anything."""
    upstream = {"args": ["-c", LIGHT, "http://169.254.169.254/schema.json"], "tools": {}}

    async def body(proxy: ToolProxy, token: str) -> None:
        return None

    with pytest.raises(ProxyError, match="leads out of the document"):
        with_proxy(config(tmp_path, upstream), body)


def test_the_oldest_protocol_and_the_audit_line(tmp_path: Path) -> None:
    """A server of a few lines that knows the handshake of 2025-06 only; its tool is destructive
    until somebody says otherwise."""

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        bad = await proxy.call(token, "t", {"a": "x"})
        assert bad.error == "bad_arguments"
        return await proxy.call(token, "t", {"a": 1}, repairs=("key:style",), policy_version=9)

    upstream = {"args": ["-c", LIGHT, "#/$defs/A"], "tools": {}}
    assert with_proxy(config(tmp_path, upstream), body).value == {"a": 1}
    line = json.loads((tmp_path / "state/audit.jsonl").read_text().splitlines()[1])
    assert (line["kind"], line["effect"], line["mode"]) == ("mcp", "destructive", "live")
    assert (line["repairs"], line["policy_version"]) == (["key:style"], 9)


def test_the_kill_switch_starts_no_server(tmp_path: Path) -> None:
    """A live world is loaded from its cassette and replays."""
    cassette = str(tmp_path / "c.jsonl")
    light = {"args": ["-c", LIGHT, "#/$defs/A"], "tools": {}, "cassette": cassette}

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "t", {"a": 1})

    recorded = with_proxy(config(tmp_path, {**light, "mode": "record"}), body)
    dead = {**light, "mode": "live", "command": "/no/such/server"}
    replayed = with_proxy(config(tmp_path / "k", dead, kill_switch=True), body)
    assert (replayed.mode, replayed.text) == ("replay", recorded.text)
