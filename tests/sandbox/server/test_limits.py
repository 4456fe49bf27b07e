"""Nothing makes the server hang or grow: bodies, capacity, broken requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandbox.server.body_limit import BodyLimit
from tests.sandbox.server.conftest import ADD, TOKEN, ServerProcess, bearer

MIB = 1 << 20
JSON = {**bearer(TOKEN), "Content-Type": "application/json"}


def test_one_session_too_many_is_503_at_once(server: ServerProcess):
    """With Retry-After, and room again as soon as one is closed."""
    ids = [server.create()[0] for _ in range(6)]
    begin = time.perf_counter()
    answer = server.post("/sessions", {"task": ADD})
    assert time.perf_counter() - begin < 2
    assert (answer.status_code, answer.json()["error"]) == (503, "busy")
    assert int(answer.headers["Retry-After"]) > 0
    assert answer.json()["infra"] is True
    server.close(ids.pop())
    ids.append(server.create()[0])
    for session_id in ids:
        server.close(session_id)
    assert server.get("/pools")["in_use"] == 0


def chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 65536):
        yield b" " * 65536


@pytest.mark.parametrize("content", [b" " * (MIB + 1), chunks(2 * MIB)], ids=["whole", "chunked"])
def test_a_body_over_1_mib_is_413(server: ServerProcess, content: Any):
    """Announced or found out on the way."""
    answer = httpx.post(
        f"{server.url}/orchestrator/sessions", headers=JSON, content=content, timeout=20
    )
    assert (answer.status_code, answer.json()["error"]) == (413, "body_too_large")


def test_a_megabyte_of_arguments_is_read(server: ServerProcess):
    """The limit is the body's; what is below it gets its observation."""
    session_id, agent = server.create()
    seen = agent.call("lookup", '{"key":"' + "x" * (MIB - 1000) + '"}')
    assert seen["error"] == "tool_error"
    server.close(session_id)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b'{"a":"\xff"}', 400),
        (b"[" * 200_000, 400),
        (b'{"task":' * 100_000, 400),
        (b'{"task":{"family":"lookup_calc","task_type":"add","seed":' + b"9" * 9999 + b"}}", 400),
        (b'{"task":{"family":"lookup_calc","task_type":"add","seed":1.5}}', 422),
        (b'{"task":{"family":"lookup_calc","task_type":"add"},"owner":"\\ud800"}', 422),
        (b"null", 422),
    ],
)
def test_broken_bodies_have_one_shape(server: ServerProcess, content: bytes, status: int):
    answer = httpx.post(f"{server.url}/orchestrator/sessions", headers=JSON, content=content)
    body = answer.json()
    assert (answer.status_code, body["error"]) == (status, "bad_request"), body
    assert set(body) == {"error", "message", "infra"} and body["infra"] is False
    assert len(body["message"]) < 300 and "\n" not in body["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/orchestrator/sessions/zz", 422, "bad_request"),
        ("GET", "/orchestrator/sessions/" + "0" * 24, 404, "not_found"),
        ("PATCH", "/orchestrator/sessions", 405, "method_not_allowed"),
        ("GET", "/orchestrator/sessions?limit=0", 422, "bad_request"),
    ],
)
def test_wrong_requests_have_one_shape(
    server: ServerProcess, method: str, path: str, status: int, code: str
):
    answer = server.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]) == (status, code)
    if status == 405:
        assert answer.headers["Allow"] == "GET, POST"


def test_a_bad_idempotency_key_is_refused(server: ServerProcess):
    answer = server.post("/sessions", {"task": ADD}, **{"Idempotency-Key": "a b"})
    assert (answer.status_code, answer.json()["error"]) == (422, "bad_request")


def test_a_body_that_does_not_arrive_is_408():
    """A client that sends half of its body holds nothing for longer than the deadline."""

    async def go() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        parts.put_nowait({"type": "http.request", "body": b"{", "more_body": True})

        async def app(*_: Any) -> None:
            raise AssertionError("the body never came")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "headers": []}
        await BodyLimit(app, MIB, 0.05)(scope, parts.get, send)  # type: ignore[arg-type]
        return sent

    sent = asyncio.run(go())
    assert sent[0]["status"] == 408 and b"body_timeout" in sent[1]["body"]
