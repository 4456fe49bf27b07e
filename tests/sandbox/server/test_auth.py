"""Who may open which door."""

from __future__ import annotations

import httpx
import pytest

from sandbox.server.errors import BadToken
from sandbox.server.tokens import digest, load_token, same
from tests.sandbox.server.conftest import TOKEN, ServerProcess, bearer

ORCHESTRATOR = [
    ("POST", "/orchestrator/sessions"),
    ("GET", "/orchestrator/sessions"),
    ("GET", "/orchestrator/sessions/{id}"),
    ("POST", "/orchestrator/sessions/{id}/verify"),
    ("DELETE", "/orchestrator/sessions/{id}"),
    ("GET", "/orchestrator/pools"),
    ("GET", "/orchestrator/metrics"),
]
AGENT = [("GET", "/agent/task"), ("POST", "/agent/calls")]


def test_the_matrix(server: ServerProcess):
    """Every route against every kind of token: 401 in one shape unless it is the door's own, and
    the body is not even looked at."""
    session_id, agent = server.create()
    closed_id, closed_agent = server.create()
    server.close(closed_id)
    refused = {
        "none": {},
        "empty": {"Authorization": "Bearer"},
        "basic": {"Authorization": f"Basic {TOKEN}"},
        "bare": {"Authorization": TOKEN},
        "wrong": bearer("x" * 40),
        "prefix": bearer(TOKEN[:-1]),
        "longer": bearer(TOKEN + "x"),
        "latin": {"Authorization": b"Bearer \xff\xfe\xe9"},
        "closed": bearer(closed_agent.token),
    }
    routes = [*((*r, "agent") for r in ORCHESTRATOR), *((*r, "orchestrator") for r in AGENT)]
    with httpx.Client(base_url=server.url) as client:
        for method, path, other in routes:
            foreign = bearer(agent.token if other == "agent" else TOKEN)
            for kind, headers in {**refused, "other door": foreign}.items():
                answer = client.request(
                    method,
                    path.format(id=session_id),
                    headers={**headers, "Content-Type": "application/json"},
                    content=b"{not json" if method == "POST" else None,
                )
                where = f"{method} {path} {kind}: {answer.text}"
                assert answer.status_code == 401, where
                assert answer.json()["error"] == "unauthorized", where
                assert answer.headers["WWW-Authenticate"] == "Bearer", where
    assert server.inspect(session_id)["state"] == "running", "nobody closed or verified it"
    assert agent.task().status_code == 200
    server.close(session_id)


def test_a_token_opens_its_own_session_only(server: ServerProcess):
    """What one agent does is not seen in the other's session."""
    first, one = server.create()
    second, _ = server.create()
    one.call("lookup", '{"key":"a"}')
    assert [server.inspect(i)["num_calls"] for i in (first, second)] == [1, 0]
    server.close(first)
    assert one.task().status_code == 401
    server.close(second)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0o600, "No such file"),
        ("", 0o600, "holds 0 characters"),
        ("short", 0o600, "holds 5 characters"),
        ("two tokens in one file", 0o600, "expected one token"),
        ("0123456789abcdef", 0o644, "other users can read it"),
        (b"\xff\xfe" * 20, 0o600, "not UTF-8"),
    ],
)
def test_bad_token_files(tmp_path, content, mode, said):
    """Each is one clear line and exit code 2."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        file.chmod(mode)
    with pytest.raises(BadToken, match=said) as caught:
        load_token(file)
    assert caught.value.exit_code == 2


def test_tokens_come_from_file_or_environment(tmp_path):
    """The file wins; without both there is no server."""
    file = tmp_path / "token"
    file.write_text("of-the-file-0123456789\n")
    file.chmod(0o600)
    environ = {"PARL_SANDBOX_TOKEN": "of-the-environment-012"}
    assert load_token(file, environ) == "of-the-file-0123456789"
    assert load_token(None, environ) == "of-the-environment-012"
    with pytest.raises(BadToken, match="--token-file or PARL_SANDBOX_TOKEN"):
        load_token(None, {})
    assert same("abc", digest("abc")) and not same("abd", digest("abc"))
