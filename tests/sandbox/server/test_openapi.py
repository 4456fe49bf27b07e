"""The served OpenAPI document holds what the server does: schemathesis, every check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.sandbox.server.conftest import TOKEN, ServerProcess, StartServer

MAX_EXAMPLES = 25


def test_every_route_names_its_errors_and_its_token(server: ServerProcess):
    """Two security schemes; each error answer is an ErrorBody."""
    spec = httpx.get(f"{server.url}/openapi.json").json()
    assert set(spec["components"]["securitySchemes"]) == {"agent", "orchestrator"}
    for path, methods in spec["paths"].items():
        door = path.split("/")[1]
        for method, operation in methods.items():
            if door in ("agent", "orchestrator"):
                assert operation["security"] == [{door: []}], (method, path)
            for status, answer in operation["responses"].items():
                if status >= "400":
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


def test_the_agent_door_names_nothing_of_the_orchestrator(server: ServerProcess):
    """No schema an agent route can answer with holds a verdict, a session or a pool."""
    spec = httpx.get(f"{server.url}/openapi.json").json()
    agent = json.dumps({p: m for p, m in spec["paths"].items() if p.startswith("/agent")})
    for name in ("VerdictBody", "SessionBody", "CreatedBody", "PoolStatus", "session_id"):
        assert name not in agent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_nothing(start_server: StartServer, tmp_path: Path):
    """Valid and invalid data, examples, limits and sequences of requests against a real server."""
    server = start_server("--sessions", "500", "--ttl", "30")
    _, agent = server.create(ttl_s=3600)
    (tmp_path / "schemathesis.toml").write_text(
        f'[auth.openapi.orchestrator]\nbearer = "{TOKEN}"\n'
        f'[auth.openapi.agent]\nbearer = "{agent.token}"\n'
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(tmp_path / "schemathesis.toml"), "run"),
            *(f"{server.url}/openapi.json", "--checks", "all", "--seed", "1"),
            *("--max-examples", str(MAX_EXAMPLES), "--no-color", "--continue-on-failure"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    assert server.metric('parl_sandbox_infra_errors_total{code="internal"}') == 0
