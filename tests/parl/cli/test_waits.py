"""Who waits for whom: files of live workers, gone workers, leases."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from infra.db.engine import open_ledger
from infra.errors import ConfigError
from infra.leases import LeaseBook
from parl.cli.waits import process_alive, read_leases, read_waits, waits_text


def write(path, pid, waits, written_at):
    data = {"worker": "runner-1", "pid": pid, "written_at": written_at, "waits": waits}
    path.write_text(json.dumps(data))


def test_a_live_worker_says_whom_it_waits_for(tmp_path):
    now = time.time()
    wait = {"owner": "e/1", "what": "engine.step", "since": now - 3, "deadline": now - 1}
    write(tmp_path / "waits-runner-1.json", os.getpid(), [wait], now)
    workers = read_waits(tmp_path, now)
    assert [worker.state for worker in workers] == ["alive"]
    text = "\n".join(waits_text(workers, []))
    assert "1 wait for engine.step" in text
    assert "3.0 s  e/1 for engine.step (LATE by 1.0 s)" in text


def test_a_dead_worker_is_gone_and_a_silent_one_hangs(tmp_path):
    now = time.time()
    child = subprocess.Popen(["true"])
    child.wait()
    wait = {"owner": "e/1", "what": "engine.step", "since": now - 60, "deadline": now + 1}
    write(tmp_path / "waits-a.json", child.pid, [wait], now - 50)
    write(tmp_path / "waits-b.json", os.getpid(), [wait], now - 50)
    assert [worker.state for worker in read_waits(tmp_path, now)] == ["gone", "hangs"]


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert not process_alive(child.pid)
    child.wait()


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "waits-a.json").write_text("{")
    with pytest.raises(ConfigError, match=r"waits-a.json is not a wait file"):
        read_waits(tmp_path)


def test_leases_say_whether_their_owner_lives(tmp_path):
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    LeaseBook(ledger).acquire("box", "box-1", 60.0)
    leases = read_leases(ledger)
    ledger.close()
    assert [(lease.kind, lease.ref, lease.owner_dead) for lease in leases] == [
        ("box", "box-1", False)
    ]
    assert "1 x box" in "\n".join(waits_text([], leases))
