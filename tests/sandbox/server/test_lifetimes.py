"""Silent clients, SIGTERM, kill -9, a port that is taken: nothing leaks and nothing hangs."""

from __future__ import annotations

import asyncio
import signal
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.db.engine import open_ledger
from infra.db.models import LeaseRow
from parl.cli import main as cli
from sandbox.backends.processes import marked_processes
from sandbox.catalog.lookup_calc.family import LookupCalc
from tests.sandbox.server.conftest import ADD, ServerProcess, StartServer, bearer, wait_for


def leases(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """Box id -> data of the leases in the server's ledger."""
    ledger = open_ledger(f"sqlite:///{server.state_dir}/ledger.db", create=False)
    with ledger.session() as session:
        found = {row.ref: dict(row.data_json) for row in session.query(LeaseRow)}
    ledger.close()
    return found


def left_of(boxes: dict[str, dict[str, Any]]) -> list[Any]:
    """Processes, cgroups and directories of these boxes that still exist."""
    paths = [p for data in boxes.values() for p in (*data["cgroups"], *data["directories"])]
    processes = [pid for box in boxes for pid in marked_processes(box)]
    return [*processes, *(path for path in paths if Path(path).exists())]


def test_a_silent_client_loses_its_session(server: ServerProcess):
    """Also one whose connection is half open in the middle of a call; a heartbeat keeps another
    session, and looking at a session is no sign of life."""
    before = server.metric('parl_sandbox_sessions_closed_total{because="ttl"}')
    kept, kept_agent = server.create(ttl_s=3.0)
    begin = time.monotonic()
    silent, silent_agent = server.create(ttl_s=1.0)
    host, _, port = server.url.removeprefix("http://").partition(":")
    half_open = socket.create_connection((host, int(port)))
    half_open.sendall(
        b"POST /agent/calls HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer " + silent_agent.token.encode() + b"\r\nContent-Length: 99\r\n\r\n{"
    )

    def closed() -> bool:
        assert kept_agent.task().status_code == 200
        return server.client.get(f"/orchestrator/sessions/{silent}").status_code == 404

    wait_for(closed, timeout_s=10)
    assert time.monotonic() - begin >= 1.0
    half_open.close()
    assert server.closed(silent)["closed_because"] == "ttl"
    assert silent_agent.task().status_code == 401
    assert server.inspect(kept)["state"] == "running"
    assert server.metric('parl_sandbox_sessions_closed_total{because="ttl"}') == before + 1
    server.close(kept)
    assert server.get("/pools")["in_use"] == 0


@pytest.mark.slow
def test_kill_9_leaves_what_the_next_start_removes(start_server: StartServer):
    """The next server on the same ledger reaps the boxes of the dead one, then serves; SIGTERM of
    that one closes its boxes and exits 0."""
    first = start_server("--sessions", "4")
    for _ in range(2):
        first.create()
    abandoned = leases(first)
    assert len(abandoned) == 2 and all(data["process"] for data in abandoned.values())
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert set(leases(first)) == set(abandoned), "the rows outlive the server"

    second = start_server("--sessions", "4", state_dir=first.state_dir)
    assert left_of(abandoned) == [] and leases(second) == {}
    assert "boxes_reaped removed=2" in second.words
    _, agent = second.create()
    agent.call("lookup", '{"key":"a"}')
    held = leases(second)
    assert len(held) == 1 and left_of(held)
    assert second.stop(signal.SIGTERM) == 0
    assert leases(second) == {} and left_of(held) == []


def test_sigterm_closes_every_box(start_server: StartServer):
    """Exit code 0, no lease, no process, no cgroup."""
    server = start_server("--sessions", "4")
    for _ in range(2):
        server.create()
    held = leases(server)
    assert len(held) == 2 and left_of(held)
    assert server.stop(signal.SIGTERM) == 0
    assert leases(server) == {} and left_of(held) == []


def test_a_taken_port_is_one_line_and_exit_1(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """It names who has it."""
    monkeypatch.setenv("PARL_SANDBOX_TOKEN", "0123456789abcdef")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert cli.run(["sandbox", "serve", "--state-dir", str(tmp_path), "--port", port]) == 1
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use (held by pid" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--token-file", "/nonexistent/token"], "token file /nonexistent/token: No such file"),
        ([], "no token for the orchestrator door"),
        (["--level", "Z"], "sandbox.level = 'Z'"),
        (["--tasks", "/nonexistent"], "task root /nonexistent: no such folder"),
        (["--state-dir", "/dev/null/x"], "state folder /dev/null/x"),
        (["--ledger", "mongodb://x"], "mongodb"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
):
    if words and words[0] != "--token-file":
        monkeypatch.setenv("PARL_SANDBOX_TOKEN", "0123456789abcdef")
    else:
        monkeypatch.delenv("PARL_SANDBOX_TOKEN", raising=False)
    state = [] if "--state-dir" in words else ["--state-dir", str(tmp_path)]
    assert cli.run(["sandbox", "serve", "--port", "0", *state, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_fifty_sessions_at_once(start_server: StartServer):
    """All created and solved at the same time; the 51st is refused; all boxes come back."""
    server = start_server("--sessions", "50")
    family = LookupCalc()

    async def go() -> None:
        limits = httpx.Limits(max_connections=120)
        async with httpx.AsyncClient(base_url=server.url, timeout=90, limits=limits) as client:
            head = dict(server.client.headers)

            async def create(index: int) -> dict[str, Any]:
                body = {"task": {**ADD, "index": index}}
                answer = await client.post("/orchestrator/sessions", json=body, headers=head)
                assert answer.status_code == 201, answer.text
                return answer.json()

            made = await asyncio.gather(*map(create, range(50)))
            over = await client.post("/orchestrator/sessions", json={"task": ADD}, headers=head)
            assert over.status_code == 503 and over.headers["Retry-After"]
            assert len({one["agent_token"] for one in made}) == 50

            async def play(index: int) -> float:
                spec = family.instance(3, index, "train", "add")
                token = bearer(made[index]["agent_token"])
                oracle = family.oracle(spec)
                for call in (call for calls in oracle.rounds for call in calls):
                    body = {"name_text": call.name_text, "arguments_text": call.arguments_text}
                    seen = await client.post("/agent/calls", json=body, headers=token)
                    assert seen.status_code == 200 and seen.json()["error"] is None, seen.text
                path = f"/orchestrator/sessions/{made[index]['session']['id']}"
                verdict = await client.post(
                    f"{path}/verify", json={"final_text": oracle.final_text}, headers=head
                )
                assert (await client.delete(path, headers=head)).status_code == 200
                return verdict.json()["correctness"]

            assert await asyncio.gather(*map(play, range(50))) == [1.0] * 50

    asyncio.run(go())
    pools = server.get("/pools")
    assert pools["in_use"] == 0 and pools["pools"][0]["lost"] == 0
    held = leases(server)
    assert server.stop() == 0
    assert leases(server) == {} and left_of(held) == []


def test_a_ledger_that_cannot_be_opened_is_one_line_and_exit_1(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """Before anything is served."""
    monkeypatch.setenv("PARL_SANDBOX_TOKEN", "0123456789abcdef")
    (tmp_path / "ledger.db").write_bytes(b"this is no database" * 100)
    assert cli.run(["sandbox", "serve", "--port", "0", "--state-dir", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "ledger" in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_broken_ledger_is_infrastructure(start_server: StartServer):
    """Its table is gone: 5xx with infra true and one line, no slot is lost, the server stays up."""
    server = start_server("--sessions", "2")
    with closing(sqlite3.connect(server.state_dir / "ledger.db")) as db, db:
        db.execute("ALTER TABLE lease RENAME TO elsewhere")
    for _ in range(3):
        answer = server.post("/sessions", {"task": ADD})
        body = answer.json()
        assert answer.status_code in (500, 503) and body["infra"] is True, body
        assert "\n" not in body["message"]
    assert server.get("/pools")["in_use"] == 0
    with closing(sqlite3.connect(server.state_dir / "ledger.db")) as db, db:
        db.execute("ALTER TABLE elsewhere RENAME TO lease")
    server.close(server.create()[0])
    assert server.stop() == 0
