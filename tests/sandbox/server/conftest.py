"""A real server process on a free port, and clients for its two doors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.backends.base import Level
from tests.sandbox.conftest import best_level

TOKEN = "orchestrator-token-of-the-tests"
ROOT = Path(__file__).parents[3]
ADD = {"family": "lookup_calc", "task_type": "add", "seed": 3, "index": 5}


def bearer(token: str) -> dict[str, str]:
    """The header of a token."""
    return {"Authorization": f"Bearer {token}"}


class ServerProcess:
    """``parl sandbox serve`` in a process of its own."""

    def __init__(self, state_dir: Path, *options: str, env: dict[str, str] | None = None) -> None:
        level = best_level()
        words = ["--state-dir", str(state_dir), "--port", "0", "--level", level.value]
        words += ["--unsafe-local"] if level is Level.C else []
        self.state_dir = state_dir
        self._log = state_dir.parent / f"{state_dir.name}.err"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parl.cli.main", "sandbox", "serve", *words, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PARL_SANDBOX_TOKEN": TOKEN, **(env or {})},
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"serving on (http://\S+)", line)
        assert found, f"{line!r}, stderr: {self.words}"
        self.url = found[1]
        self.client = httpx.Client(base_url=self.url, headers=bearer(TOKEN), timeout=60)

    @property
    def words(self) -> str:
        """What the server wrote to stderr."""
        return self._log.read_text()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """As the orchestrator."""
        return self.client.post(f"/orchestrator{path}", json=body, headers=headers)

    def get(self, path: str, **params: Any) -> Any:
        """As the orchestrator; the answer must be 200."""
        answer = self.client.get(f"/orchestrator{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def create(self, task: dict[str, Any] | None = None, **more: Any) -> tuple[str, Agent]:
        """(session id, its agent)."""
        answer = self.post("/sessions", {"task": task or ADD, **more})
        assert answer.status_code == 201, answer.text
        body = answer.json()
        return body["session"]["id"], Agent(self.url, body["agent_token"])

    def inspect(self, session_id: str) -> dict[str, Any]:
        return self.get(f"/sessions/{session_id}")

    def closed(self, session_id: str) -> dict[str, Any]:
        """What is remembered of a closed session."""
        return self.get(f"/closed/{session_id}")

    def verify(self, session_id: str, text: str) -> httpx.Response:
        return self.post(f"/sessions/{session_id}/verify", {"final_text": text})

    def close(self, session_id: str) -> httpx.Response:
        return self.client.delete(f"/orchestrator/sessions/{session_id}")

    def metric(self, name: str) -> float:
        """Value of one line of the exposition; 0 when it is not there yet."""
        text = self.client.get("/orchestrator/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = 20) -> int:
        """Send a signal; exit code."""
        self.client.close()
        self.process.send_signal(sig)
        code = self.process.wait(timeout=timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Agent:
    """The agent's side of one session."""

    def __init__(self, url: str, token: str) -> None:
        self.token = token
        self._url = url

    def task(self) -> httpx.Response:
        return httpx.get(f"{self._url}/agent/task", headers=bearer(self.token), timeout=60)

    def send(self, body: Any, **headers: str) -> httpx.Response:
        """Any body to the calls of this session."""
        headers = {**bearer(self.token), **headers}
        return httpx.post(f"{self._url}/agent/calls", json=body, headers=headers, timeout=60)

    def call(self, name: str, arguments: str) -> dict[str, Any]:
        """The observation; the answer must be 200."""
        answer = self.send({"name_text": name, "arguments_text": arguments})
        assert answer.status_code == 200, answer.text
        return answer.json()


StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """``start_server(*options, state_dir=, env=)``; what still runs at the end is stopped."""
    started: list[ServerProcess] = []

    def start(*options: str, state_dir: Path | None = None, **more: Any) -> ServerProcess:
        folder = state_dir or tmp_path_factory.mktemp("server") / "state"
        started.append(ServerProcess(folder, *options, **more))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> ServerProcess:
    """One server for all tests that do not end it."""
    return start_server("--sessions", "6")


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)
