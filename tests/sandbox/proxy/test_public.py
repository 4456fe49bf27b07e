"""What others wrote: a public MCP server and a public OpenAPI document with its own server, each
recorded once and replayed where there is no network."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.ports import free_port
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from tests.sandbox.proxy.conftest import with_proxy
from tests.sandbox.proxy.cut_off import play_cut_off

pytestmark = pytest.mark.slow
TOKEN = "a-token-only-the-proxy-knows"
Script = list[tuple[str, dict[str, Any]]]


def play(config: ProxyConfig, script: Script) -> tuple[list[str], list[ProxyResult]]:
    async def body(proxy: ToolProxy, token: str) -> Any:
        tools = [spec.name for spec in proxy.tools(token)]
        return tools, [await proxy.call(token, name, arguments) for name, arguments in script]

    return with_proxy(config, body)


def config(folder: Path, upstream: dict[str, Any], **node: Any) -> ProxyConfig:
    cassette = {"cassette": str(folder / "cassette.jsonl")}
    worlds = {"w": {"upstreams": {"public": {**cassette, **upstream}}}}
    return ProxyConfig.model_validate({"state_dir": str(folder / "s"), "worlds": worlds, **node})


def check_replay(recorded: list[ProxyResult], replayed: list[ProxyResult]) -> None:
    assert [r.text for r in replayed] == [r.text for r in recorded]
    assert [r.error for r in replayed] == [r.error for r in recorded]
    assert all(r.cassette_hit for r in replayed)


def test_a_public_mcp_server(tmp_path: Path) -> None:
    """mcp-server-time over stdio; replay has no command to start."""
    read = {"effect": "read"}
    upstream = {
        "kind": "mcp",
        "mode": "record",
        "command": sys.executable,
        "args": ["-m", "mcp_server_time", "--local-timezone", "Asia/Shanghai"],
        "tools": {"get_current_time": read, "convert_time": read},
    }
    script: Script = [
        ("get_current_time", {"timezone": "Asia/Shanghai"}),
        (
            "convert_time",
            {"source_timezone": "Asia/Shanghai", "time": "16:30", "target_timezone": "Asia/Tokyo"},
        ),
        ("get_current_time", {"timezone": "Mars/Olympus"}),
    ]
    tools, recorded = play(config(tmp_path, upstream), script)
    assert tools == ["get_current_time", "convert_time"]
    assert recorded[0].value["timezone"] == "Asia/Shanghai"
    assert recorded[1].value["time_difference"] == "+1.0h"
    assert (recorded[2].error, recorded[2].infra) == ("tool_error", False)
    offline = {**upstream, "mode": "replay", "command": "/no/such/server"}
    again, replayed = play_cut_off(config(tmp_path, offline), script, tmp_path)
    assert again == tools
    check_replay(recorded, replayed)


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with Jupyter Server, from the package registry."""
    folder = tmp_path_factory.mktemp("jupyter")
    venv.create(folder, with_pip=True)
    subprocess.run(
        [folder / "bin/python", "-m", "pip", "install", "-q", "jupyter_server"],
        check=True,
        capture_output=True,
        timeout=280,
    )
    return folder


@contextlib.contextmanager
def serving(jupyter: Path, folder: Path) -> Iterator[int]:
    port = free_port()
    server = subprocess.Popen(
        [
            *(jupyter / "bin/python", "-m", "jupyter_server", "--no-browser", "--allow-root"),
            *(
                f"--port={port}",
                f"--IdentityProvider.token={TOKEN}",
                f"--ServerApp.root_dir={folder}",
            ),
        ],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={"HOME": str(folder), "PATH": f"{jupyter}/bin:/usr/bin:/bin"},
    )
    try:
        deadline = time.monotonic() + 60
        while not answers(f"http://127.0.0.1:{port}/api"):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait(30)


def answers(url: str) -> bool:
    try:
        return "version" in json.load(urllib.request.urlopen(url, timeout=2))
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.mark.net
@pytest.mark.timeout(400)
def test_a_public_openapi_document(
    tmp_path: Path, jupyter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminals API of Jupyter Server, by the document its package ships: a credential in a
    header, reads before and after writes, an error, then the same with the server gone."""
    monkeypatch.setenv("PARL_TEST_SECRET", TOKEN)
    (document,) = jupyter.glob("lib/*/site-packages/jupyter_server_terminals/rest-api.yml")
    upstream = {"kind": "openapi", "document": str(document), "mode": "record"}
    secret = {"env": "PARL_TEST_SECRET", "bind": [
        {"host": "127.0.0.1", "format": "token {secret}", "allow_plain_http": True}]}  # fmt: skip
    script: Script = [
        ("get_api_terminals", {}),
        ("post_api_terminals", {}),
        ("get_api_terminals", {}),
        ("get_api_terminals_terminal_id", {"terminal_id": "1"}),
        ("delete_api_terminals_terminal_id", {"terminal_id": "1"}),
        ("get_api_terminals", {}),
        ("get_api_terminals_terminal_id", {"terminal_id": "1"}),
    ]
    with serving(jupyter, tmp_path) as port:
        recording = config(
            tmp_path,
            {**upstream, "server_url": f"http://127.0.0.1:{port}"},
            secrets={"jupyter": secret},
            network={"allow_addresses": [f"127.0.0.1:{port}"]},
        )
        tools, recorded = play(recording, script)
    assert {name for name, _ in script} <= set(tools)
    assert [r.error for r in recorded] == [None] * 6 + ["upstream_4xx"]
    assert recorded[0].value == []
    assert recorded[2].value[0]["name"] == "1" and recorded[5].value == []
    monkeypatch.delenv("PARL_TEST_SECRET")
    offline = {**upstream, "server_url": f"http://127.0.0.1:{port}", "mode": "replay"}
    again, replayed = play_cut_off(config(tmp_path, offline), script, tmp_path)
    assert again == tools
    check_replay(recorded, replayed)
    assert TOKEN not in (tmp_path / "cassette.jsonl").read_text()
