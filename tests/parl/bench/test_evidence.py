"""The evidence harness: records survive, kills are drawn, traces are compared bit for bit."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from parl.bench.kill_points import draw_points, frozen, wait_for, worker_in_call
from parl.bench.loop_evidence import all_items, summary
from parl.bench.records import Item, Records
from parl.bench.run_trace import differences, read_trace
from tests.parl.report.synthetic import RUN_ID, make_run


def test_records_are_kept_and_found_by_the_next_call(tmp_path):
    """Each measurement is on disk at once, with commit and machine."""
    path = tmp_path / "loop.json"
    Records(path).run(Item("a", lambda: {"ok": True, "value": 0.1}))
    again = Records(path)
    again.run(Item("b", lambda: {"ok": False}))
    again = Records(path)
    assert "a" in again and "b" in again and "c" not in again
    assert again.get("a")["value"] == 0.1
    assert {"commit", "started_at", "seconds", "machine"} <= again.get("a").keys()


def test_a_measurement_that_breaks_leaves_no_record(tmp_path):
    records = Records(tmp_path / "loop.json")
    with pytest.raises(ZeroDivisionError):
        records.run(Item("a", lambda: {"ok": bool(1 / 0)}))
    assert "a" not in Records(tmp_path / "loop.json")


def test_kill_points_cover_every_target_and_a_tool_call():
    """The same seed draws the same ten moments; one of them at least is inside a tool call."""
    points = draw_points(10, 4, seed=1)
    assert points == draw_points(10, 4, seed=1) != draw_points(10, 4, seed=2)
    assert {point.target for point in points} == {"runner", "engine", "driver"}
    assert any(point.in_tool_call for point in points)
    assert all(point.target == "runner" for point in points if point.in_tool_call)
    assert all(0 <= p.round_index < 4 and 0 <= p.delay < 1 for p in points)


def test_frozen_processes_wake_up_again():
    child = subprocess.Popen(["sleep", "30"])
    try:
        with frozen([child.pid]):
            wait_for(lambda: _state(child.pid) == "T" or None, 20, "the child to stop")
        wait_for(lambda: _state(child.pid) == "S" or None, 20, "the child to go on")
    finally:
        child.kill()
        child.wait()


def test_a_worker_inside_a_tool_call_is_recognised(tmp_path):
    from parl.rollout.waits import Wait, Waits

    waits = Waits("w0")
    waits.dump(tmp_path / "waits-w0.json")
    assert worker_in_call(tmp_path, newer_than=0.0) is None
    waits._open[0] = Wait("e", "sandbox.call", time.time(), time.time() + 1)
    waits.dump(tmp_path / "waits-w0.json")
    worker = worker_in_call(tmp_path, newer_than=time.time() - 60)
    assert worker is not None and worker.pid == os.getpid()


def test_waiting_ends_with_a_name():
    with pytest.raises(TimeoutError, match="for the moon"):
        wait_for(lambda: None, 0.05, "the moon")


def test_traces_differ_in_the_last_bit(tmp_path):
    """Floats are compared exactly; every difference is named."""
    ledger = make_run(tmp_path, num_rounds=2, per_type=2)
    trace = read_trace(ledger, RUN_ID)
    ledger.close()
    assert trace.numbers["train/1"] == (0.1, 1.5)
    assert len(trace.rewards["train/0"]) == 4
    assert differences(trace, trace) == []
    loss = trace.numbers["train/1"][0]
    other = replace(trace, numbers={**trace.numbers, "train/1": (loss + 2**-54, 1.5)})
    assert differences(trace, other)[0].startswith("numbers of train/1: (0.1000000")


def test_items_have_unique_names_and_a_summary(tmp_path):
    names = [item.name for item in all_items(tmp_path)]
    assert len(set(names)) == len(names)
    assert {"seed-1", "control-1", "kill-09", "job-fails", "undisturbed"} <= set(names)
    record = {"ok": True, "differences": []}
    assert "1 of 1 runs bit-identical" in summary({"kill-00": record})


def _state(pid: int) -> str:
    with Path(f"/proc/{pid}/stat").open() as file:
        return file.read().rpartition(")")[2].split()[0]
