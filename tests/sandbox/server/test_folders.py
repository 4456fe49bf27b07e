"""Task folders: only certified ones, only below the roots; and what a slow or dying tool does."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.db.engine import open_ledger
from infra.db.models import LeaseRow
from sandbox.check.certificate import issue, write_certificate
from sandbox.check.findings import CheckReport, Step
from sandbox.check.keys import load_key
from sandbox.check.subject import content_hash
from tests.sandbox.server.conftest import ServerProcess, StartServer, wait_for

MANIFEST = """
schema_version = "1.4"
[task]
name = "tests/nap"
[verifier]
timeout_sec = 10
[environment]
network_mode = "no-network"
[metadata.parl]
task_type = "nap"
[metadata.parl.budget]
call_timeout_s = 20
"""
TOOLS = '''
import os, signal, time
from sandbox.toolkit import tool

def setup(data):
    pass

@tool(effect="read")
def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"

def end_state():
    return {}
'''
VERIFY = """
def verify(final_text, end_state, data):
    if final_text == "crash":
        raise ValueError("not this one")
    extra = float("nan") if final_text == "odd" else 1.0
    return {"correctness": float(final_text == "done"), "reasons": [], "extra": extra}
"""
NAP = {"folder": "nap"}


def write_task(folder: Path) -> Path:
    for name, text in (
        ("task.toml", MANIFEST),
        ("instruction.md", "Sleep, then say done."),
        ("tools/tools.py", TOOLS),
        ("tests/verify.py", VERIFY),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def certify(folder: Path) -> None:
    """Sign what the folder holds now."""
    report = CheckReport(str(folder), "tests/nap", "", content_hash(folder), steps=[Step("schema")])
    report.flake = {"repeat": 5}
    write_certificate(folder, issue(report, load_key()))


@pytest.fixture(scope="module")
def napping(tmp_path_factory: pytest.TempPathFactory, start_server: StartServer) -> ServerProcess:
    """A server with one root: nap (certified), changed, plain, a link out of the root."""
    root = tmp_path_factory.mktemp("tasks")
    outside = tmp_path_factory.mktemp("outside")
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(outside / "config")
    try:
        for name in ("nap", "changed"):
            certify(write_task(root / name))
        server = start_server("--tasks", str(root), "--ttl", "60")
    finally:
        if before is None:
            del os.environ["XDG_CONFIG_HOME"]
        else:
            os.environ["XDG_CONFIG_HOME"] = before
    (root / "changed" / "instruction.md").write_text("Say done.")
    write_task(root / "plain")
    write_task(outside / "task")
    (root / "link").symlink_to(outside / "task")
    return server


def test_a_certified_folder_is_served(napping: ServerProcess):
    session_id, agent = napping.create(NAP)
    assert agent.task().json()["instruction"] == "Sleep, then say done."
    assert agent.call("nap", '{"seconds": 0.01}')["text"] == "slept"
    assert napping.verify(session_id, "done").json()["passed"] is True
    napping.close(session_id)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("plain", "has no certificate"),
        ("changed", "its certificate is for content"),
        ("link", "leaves"),
    ],
)
def test_other_folders_are_refused(napping: ServerProcess, folder: str, said: str):
    """422 with what to do; nothing was opened."""
    answer = napping.post("/sessions", {"task": {"folder": folder}})
    assert (answer.status_code, answer.json()["error"]) == (422, "bad_task")
    assert said in answer.json()["message"]
    assert napping.get("/pools")["in_use"] == 0


@pytest.mark.parametrize("text", ["crash", "odd"])
def test_a_verifier_that_fails_is_no_verdict(napping: ServerProcess, text: str):
    """correctness null, never 0; a number JSON has not is spelt out."""
    session_id, _ = napping.create(NAP)
    verdict = napping.verify(session_id, text).json()
    if text == "crash":
        assert verdict["correctness"] is None and "ValueError" in verdict["error"]
    else:
        assert verdict["correctness"] == 0.0 and verdict["details"] == {"extra": "nan"}
    napping.close(session_id)


def test_closing_ends_a_running_call(napping: ServerProcess):
    """The call answers 404 at once, the next one 401; calls behind it too."""
    session_id, agent = napping.create(NAP)
    with ThreadPoolExecutor(3) as threads:
        body = {"name_text": "nap", "arguments_text": '{"seconds": 15}'}
        waiting = [threads.submit(agent.send, body) for _ in range(3)]
        wait_for(lambda: napping.inspect(session_id)["num_waiting"] == 3)
        assert napping.close(session_id).status_code == 200
        answers = [one.result(timeout=30) for one in waiting]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert {answer.json()["error"] for answer in answers} == {"session_closed"}
    assert agent.task().status_code == 401
    assert napping.get("/pools")["in_use"] == 0


def test_a_lost_box_is_502_and_nobodys_reward(napping: ServerProcess):
    """SIGKILL from outside in the middle of a call: infra true at both doors, the orchestrator
    alone reads why, and the session can be closed."""
    before = num_lost(napping)
    session_id, agent = napping.create(NAP, owner="victim")
    with ThreadPoolExecutor(1) as threads:
        body = {"name_text": "nap", "arguments_text": '{"seconds": 15}'}
        waiting = threads.submit(agent.send, body)
        wait_for(lambda: napping.inspect(session_id)["num_calls"] == 1)
        os.kill(box_pid(napping, "victim"), signal.SIGKILL)
        answer = waiting.result(timeout=30)
    lost = {"error": "sandbox_lost", "infra": True}
    assert answer.status_code == 502 and lost.items() <= answer.json().items()
    assert answer.json()["message"] == "the infrastructure failed; this episode has no reward"
    assert agent.send(body).status_code == 502
    verdict = napping.verify(session_id, "done")
    assert verdict.status_code == 502 and lost.items() <= verdict.json().items()
    assert napping.inspect(session_id)["lost"] == verdict.json()["message"]
    assert napping.close(session_id).status_code == 200
    assert napping.metric('parl_sandbox_infra_errors_total{code="sandbox_lost"}') == 3
    assert num_lost(napping) == before + 1


def test_too_many_calls_of_one_session_wait(napping: ServerProcess):
    """Past 32 a call is told so at once."""
    session_id, agent = napping.create(NAP)
    with ThreadPoolExecutor(34) as threads:
        body = {"name_text": "nap", "arguments_text": '{"seconds": 15}'}
        waiting = [threads.submit(agent.send, body) for _ in range(34)]
        wait_for(lambda: sum(one.done() for one in waiting) >= 2)
        napping.close(session_id)
        codes = sorted(one.result(timeout=30).status_code for one in waiting)
    assert codes == [404] * 32 + [429] * 2


def num_lost(server: ServerProcess) -> int:
    return sum(pool["lost"] for pool in server.get("/pools")["pools"])


def box_pid(server: ServerProcess, owner: str) -> int:
    """Host pid of the box an episode runs in, from its lease."""
    ledger = open_ledger(f"sqlite:///{server.state_dir}/ledger.db", create=False)
    with ledger.session() as session:
        rows = [row.data_json for row in session.query(LeaseRow) if row.data_json["owner"] == owner]
    ledger.close()
    return int(rows[0]["process"].split(":")[1])


def test_a_folder_that_vanishes_is_not_found(napping: ServerProcess, tmp_path: Path):
    """Tasks are read when they are asked for."""
    root = Path(napping.process.args[napping.process.args.index("--tasks") + 1])  # type: ignore
    write_task(root / "brief")
    shutil.rmtree(root / "brief")
    assert napping.post("/sessions", {"task": {"folder": "brief"}}).status_code == 404


def test_sigterm_ends_a_running_call(napping: ServerProcess):
    """The last test of this server: the call is told so (infra), the exit is 0 and quick."""
    session_id, agent = napping.create(NAP, owner="last")
    pid = box_pid(napping, "last")
    with ThreadPoolExecutor(1) as threads:
        body = {"name_text": "nap", "arguments_text": '{"seconds": 15}'}
        waiting = threads.submit(agent.send, body)
        wait_for(lambda: napping.inspect(session_id)["num_calls"] == 1)
        assert napping.stop(signal.SIGTERM, timeout_s=12) == 0
        answer = waiting.result(timeout=30)
    assert (answer.status_code, answer.json()["infra"]) == (503, True)
    assert not Path(f"/proc/{pid}").exists()
