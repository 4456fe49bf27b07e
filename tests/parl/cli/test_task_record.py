"""``parl task record``: from a task with real tools to one that replays without them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parl.cli import main as cli
from sandbox.backends.base import Level
from tests.sandbox.conftest import need
from tests.sandbox.proxied_tasks import api_task, operator, write_task
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.cut_off import ROOT, without_network

SECRET = "s3cr3t-value-of-the-operator"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(Level.A)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("PARL_TEST_SECRET", SECRET)


def with_secret(folder: Path, api: ApiServer) -> str:
    path = operator(folder, api)
    path.write_text(
        path.read_text()
        + '[secrets.key]\nenv = "PARL_TEST_SECRET"\n'
        + 'bind = [{host = "127.0.0.1", format = "Bearer {secret}", allow_plain_http = true}]\n'
    )
    return str(path)


def check_cut_off(folder: Path) -> str:
    """``parl task check`` in a process without any network."""
    words = [sys.executable, "-m", "parl.cli.main", "task", "check", str(folder), "--repeat", "2"]
    done = subprocess.run(
        without_network(words),
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_recording_must_be_allowed(
    tmp_path: Path, api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says how; the same for a run and a check of tools that are live."""
    folder = api_task(tmp_path / "task", api, mode="live")
    for verb in ("record", "run", "check"):
        assert cli.run(["task", verb, str(folder)]) == 2
        said = capsys.readouterr().err
        assert "--allow-live" in said.splitlines()[-1] and api.hits.total() == 0
    assert cli.run(["task", "record", str(folder), "--allow-live", "--agent", "nop"]) == 2
    assert "oracle, shell" in capsys.readouterr().err
    assert cli.run(["task", "record", str(folder), "--allow-live", "--proxy", "none.toml"]) == 2
    assert "none.toml: no such file" in capsys.readouterr().err
    plain = write_task(tmp_path / "plain", "")
    assert cli.run(["task", "record", str(plain), "--allow-live"]) == 2
    assert "there is nothing to record" in capsys.readouterr().err


@pytest.mark.slow
def test_the_solution_is_recorded_and_what_came_back_is_told(
    tmp_path: Path, api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls and scrubbed places are counted, the replay is compared, the audit stays in the task;
    with the API gone the task runs, and live ones run while allowed."""
    folder = api_task(tmp_path / "task", api)
    text = (folder / "task.toml").read_text().replace('"status",', '"status", "echo",')
    (folder / "task.toml").write_text(text)
    calls = folder / "solution" / "calls.jsonl"
    calls.write_text('{"name": "echo", "arguments": {}}\n' + calls.read_text())
    proxy = with_secret(tmp_path, api)
    assert cli.run(["task", "record", str(folder), "--allow-live", "--proxy", proxy]) == 0
    out = capsys.readouterr().out
    assert "calls recorded in cassettes/api.jsonl: 3 (GET /v1/echo 1, GET /v1/weather 1" in out
    assert "secrets scrubbed in cassettes/api.jsonl: 4 (GET /v1/echo 4)" in out
    assert "calls replayed offline: 4, all equal" in out and SECRET not in out
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET not in path.read_text("utf-8", "replace"), path
    (audit,) = folder.glob(".parl/proxy/pool-*/audit.jsonl")
    assert {json.loads(line)["mode"] for line in audit.read_text().splitlines()} == {"record"}
    live = api_task(tmp_path / "live", api, mode="live")
    assert cli.run(["task", "run", str(live), "--allow-live", "--proxy", proxy]) == 0
    api.stop()
    assert cli.run(["task", "run", str(folder)]) == 0


def test_a_person_may_record(
    tmp_path: Path,
    api: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines as of ``parl task run --agent shell``."""
    folder = api_task(tmp_path / "task", api)
    lines = '{"name": "weather", "arguments": {"city": "Rome"}}\n{"final_text": "42 degrees"}\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    words = ["task", "record", str(folder), "--agent", "shell", "--allow-live"]
    assert cli.run([*words, "--proxy", str(operator(tmp_path, api))]) == 0
    assert "calls recorded in cassettes/api.jsonl: 1 (GET /v1/weather 1)" in capsys.readouterr().out


def test_a_recording_that_fails_says_so(
    tmp_path: Path, api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The solution's answer is wrong: exit 1, and the cassette is what it was: none, or the last
    good one. A call that its API refused is named, and effects are not blamed."""
    folder = api_task(tmp_path / "task", api)
    data, cassette = folder / "tests" / "data.json", folder / "cassettes" / "api.jsonl"
    beside = cassette.with_name("api.failed.jsonl")
    right = data.read_text()
    data.write_text('{"answer": "41"}')
    words = ["task", "record", str(folder), "--allow-live", "--proxy"]
    words.append(str(operator(tmp_path, api)))
    assert cli.run(words) == 1
    out = capsys.readouterr().out
    assert "the episode fails: mend it and record again\n" in out
    assert "this recording is in cassettes/api.failed.jsonl" in out
    assert not cassette.exists() and beside.read_text().count("\n") == 2
    data.write_text(right)
    assert cli.run(words) == 0
    good = cassette.read_bytes()
    calls = folder / "solution" / "calls.jsonl"
    calls.write_text('{"name": "weather", "arguments": {"city": "nowhere"}}\n' + calls.read_text())
    assert "not kept" not in capsys.readouterr().out
    api.stop()
    assert cli.run(words) == 1
    out = capsys.readouterr().out
    assert "replay differs" in out and "call 1 (weather) failed: infra_error: " in out
    assert "declare the effects" not in out and "unreachable" in out
    assert cassette.read_bytes() == good


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_recorded_api_is_checked_without_a_network(
    tmp_path: Path, api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole ``parl task check`` in a network namespace of its own."""
    folder = api_task(tmp_path / "task", api)
    words = ["task", "record", str(folder), "--allow-live", "--proxy"]
    assert cli.run([*words, str(operator(tmp_path, api))]) == 0
    api.stop()
    assert "passed" in check_cut_off(folder)


TIME = """
[metadata.parl.proxy.upstreams.clock]
kind = "mcp"
command = "{command}"
args = ["-m", "mcp_server_time", "--local-timezone", "Asia/Shanghai"]
cassette = "cassettes/clock.jsonl"
tools.get_current_time = {{effect = "read"}}
tools.convert_time = {{effect = "read"}}
"""
TIME_CALLS = [
    {"name": "get_current_time", "arguments": {"timezone": "Asia/Shanghai"}},
    {
        "name": "convert_time",
        "arguments": {
            "source_timezone": "Asia/Shanghai",
            "time": "16:30",
            "target_timezone": "Asia/Tokyo",
        },
    },
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_public_mcp_server_is_recorded_and_checked_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mcp-server-time of the package registry, in its box; then its time stands still."""
    folder = write_task(tmp_path / "task", TIME.format(command=sys.executable), TIME_CALLS)
    assert cli.run(["task", "record", str(folder), "--allow-live"]) == 0
    out = capsys.readouterr().out
    assert "calls recorded in cassettes/clock.jsonl: 2 (convert_time 1, get_current" in out
    assert "lists of tools recorded in cassettes/clock.jsonl: 1" in out
    assert "calls replayed offline: 2, all equal" in out
    assert "passed" in check_cut_off(folder)
