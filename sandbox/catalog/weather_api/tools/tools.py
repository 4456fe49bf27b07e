"""Tools of weather_api: an HTTP client for the weather service. Run in the box.

The service is a process of its own on a Unix socket in the working directory: boxes have no
network, and a loopback port would be shared with the host at level C. It is started by ``setup``
and again by the first call that does not find it.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from sandbox.toolkit import ToolError, tool, workdir

SERVICE_SOURCE = ""  # the family puts service.py here
START_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 8.0
MAX_WAIT_S = 5
SHOWN_HEADERS = ("Retry-After", "Content-Type")


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("weather", timeout=REQUEST_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """See ``HTTPConnection``."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def setup(data: dict[str, Any]) -> None:
    """Write the service's world and start it."""
    (workdir() / "world.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    _start()


@tool(effect="read")
def http_get(path: str, query: dict[str, str] = {}) -> str:  # noqa: B006
    """GET a path of the weather service, for example /v2/docs; answers with status, headers and
    JSON. ``query`` holds the parameters."""
    if not path.startswith("/") or any(ord(char) < 33 for char in path):
        raise ToolError("path must start with / and hold no spaces")
    pairs = {key: _text(value) for key, value in query.items()}
    target = quote(path, safe="/%?&=") + ("?" + urlencode(pairs) if pairs else "")
    connection = _connect()
    try:
        connection.request("GET", target, headers={"Accept": "application/json"})
        response = connection.getresponse()
        body = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise ToolError(f"no answer from the service: {type(error).__name__}") from error
    finally:
        connection.close()
    headers = [
        f"{name}: {response.headers[name]}" for name in SHOWN_HEADERS if response.headers[name]
    ]
    return "\n".join([f"HTTP {response.status} {response.reason}", *headers, "", body])


@tool(effect="read")
def wait(seconds: int) -> str:
    """Wait, at most 5 seconds."""
    if not 0 <= seconds <= MAX_WAIT_S:
        raise ToolError(f"wait 0 to {MAX_WAIT_S} seconds")
    time.sleep(seconds)
    return f"waited {seconds} s"


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ToolError("a query parameter is a text or a number")
    return str(value)


def _connect() -> _Connection:
    """A connection to the service, started again if it ended."""
    connection = _Connection(workdir() / "api.sock")
    try:
        connection.connect()
    except (FileNotFoundError, ConnectionRefusedError):
        _start()
        connection.connect()
    return connection


def _start() -> None:
    path = workdir() / "api.sock"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-I", "-S", "-B", "-c", SERVICE_SOURCE, str(path)]
    process = subprocess.Popen(
        [*command, str(workdir() / "world.json")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            if path.exists() and probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.01)
    raise RuntimeError("the weather service does not start")


def end_state() -> dict[str, Any]:
    """Nothing: the agent changes nothing, the answer counts."""
    return {}
