"""Tools over an HTTP service of this task, which runs inside the box (environment/files)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from sandbox.toolkit import ToolError, tool, workdir

START_TIMEOUT_S = 8.0


def setup(data: dict[str, Any]) -> None:
    """Write the state and the service, and start it."""
    (workdir() / "service.py").write_text(data["files"]["service.py"])
    (workdir() / "state.json").write_text(json.dumps({"orders": data["orders"]}))
    _base_url()


@tool(effect="read", idempotent=True)
def find_orders(customer: str, page: int = 1) -> str:
    """Orders of a customer, two a page; "more" says whether there is a next page."""
    query = urllib.parse.urlencode({"customer": customer, "page": page})
    return _request("GET", f"/orders?{query}")


@tool(effect="write")
def refund_order(order_id: str) -> str:
    """Refund an order; this cannot be undone."""
    return _request("POST", f"/orders/{urllib.parse.quote(order_id, safe='')}/refund")


def end_state() -> dict[str, Any]:
    """The service's state."""
    return json.loads((workdir() / "state.json").read_text())


def _request(method: str, path: str) -> str:
    request = urllib.request.Request(_base_url() + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise ToolError(f"HTTP {error.code}: {error.read().decode()[:200]}") from error


def _base_url() -> str:
    """Address of the service; it is started (again) when nothing answers."""
    note = workdir() / "port"
    if note.exists() and _answers(int(note.read_text())):
        return f"http://127.0.0.1:{note.read_text()}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    subprocess.Popen(
        [sys.executable, "-I", "service.py", "state.json", str(port)],
        cwd=workdir(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + START_TIMEOUT_S
    while not _answers(port):
        if time.monotonic() > end:
            raise ToolError("the service does not start")
        time.sleep(0.02)
    note.write_text(str(port))
    return f"http://127.0.0.1:{port}"


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
