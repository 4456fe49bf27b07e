"""Evidence (b): ``kill -9`` at random moments; the run ends with the bits of an undisturbed one.

A runner or an engine that dies is replaced while the driver goes on; a dead driver is resumed with
``parl rl resume``. Victims are found by the pids that the run itself recorded.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import select

from infra.db.models import RoundRow
from infra.errors import LedgerError
from parl.bench.command import ROOT, run_parl, start_parl
from parl.bench.kill_points import (
    KillPoint,
    draw_points,
    frozen,
    wait_for,
    worker_in_call,
)
from parl.bench.records import Item
from parl.bench.run_trace import RunTrace, box_ids, differences, read_trace
from parl.cli.runs import RunFolder, find_run, list_runs
from parl.cli.waits import process_alive
from parl.report.history import read_history
from parl.rllib.pids import read_pids
from parl.store.store import Store
from sandbox.backends.processes import marked_processes

CONFIG = ROOT / "configs" / "test.toml"
NUM_KILLS = 10
SEED = 20261130
START_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 600.0
NUM_ROUNDS = 4


def items(folder: Path) -> list[Item]:
    points = draw_points(NUM_KILLS, NUM_ROUNDS, SEED)
    baseline = _Baseline(folder)
    return [Item("undisturbed", baseline)] + [
        Item(f"kill-{number:02d}", _Kill(folder, number, point, baseline))
        for number, point in enumerate(points)
    ]


def _words(runs: Path) -> list[str]:
    words = ["rl", "run", "--config", str(CONFIG), "--set", "backend=ray"]
    return [*words, "--set", f"rounds.num_rounds={NUM_ROUNDS}", "--set", f"run.dir={runs}"]


class _Baseline:
    """The undisturbed run; others compare with its ledger, so it is made again when it is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = folder / "undisturbed"

    def __call__(self) -> dict[str, Any]:
        done = run_parl(_words(self._runs), self._folder / "undisturbed.log", RUN_TIMEOUT_S)
        if done.code != 0:
            return {"ok": False, "exit_code": done.code, "output": done.last_lines}
        run, trace = self.read()
        audit = Store(run.open_ledger(), run.run_id).audit()
        return {"ok": audit.ok, "numbers": trace.numbers, "round_s": self.round_seconds()}

    def read(self) -> tuple[RunFolder, RunTrace]:
        if not list_runs(self._runs):
            self()
        run = find_run(None, self._runs)
        return run, read_trace(run.open_ledger(), run.run_id)

    def round_seconds(self) -> float:
        run = find_run(None, self._runs)
        history = read_history(run.open_ledger(), run.run_id)
        return sum(report.seconds["total"] for report in history.rounds) / len(history.rounds)


class _Kill:
    """One kill; called = measured."""

    def __init__(self, folder: Path, number: int, point: KillPoint, baseline: _Baseline) -> None:
        self._name = f"kill-{number:02d}"
        self._folder = folder
        self._point = point
        self._baseline = baseline
        self._boxes: set[str] = set()

    def __call__(self) -> dict[str, Any]:
        _, expected = self._baseline.read()
        runs = self._folder / self._name
        log = self._folder / f"{self._name}.log"
        shutil.rmtree(runs, ignore_errors=True)  # of an interrupted measurement
        with start_parl(_words(runs), log) as driver:
            run = self._at_the_moment(runs, driver)
            killed = self._kill(run, driver)
            code = driver.wait(RUN_TIMEOUT_S)
        resumed = code != 0
        recovery_started = time.monotonic()
        if resumed and self._point.target == "driver":
            words = ["rl", "resume", str(run.path)]
            code = run_parl(words, log, RUN_TIMEOUT_S).code
        found = read_trace(run.open_ledger(), run.run_id)
        wrong = differences(expected, found)
        audit = Store(run.open_ledger(), run.run_id).audit()
        left = wait_for_none(self._boxes | box_ids(run.open_ledger()))
        return {
            "ok": code == 0 and not wrong and audit.ok and not left,
            "point": asdict(self._point),
            "killed_pid": killed,
            "exit_code": code,
            "went_on_unaided": not resumed,
            "resume_s": round(time.monotonic() - recovery_started, 1) if resumed else None,
            "differences": wrong[:10],
            "lost": audit.missing,
            "duplicated": audit.duplicated,
            "stuck": audit.stuck,
            "further_attempts": audit.attempts,
            "boxes_left": left,
        }

    def _at_the_moment(self, runs: Path, driver: subprocess.Popen[bytes]) -> RunFolder:
        """Wait until the round of the kill point runs, then for the drawn part of a round."""

        def begun() -> RunFolder | None:
            assert driver.poll() is None, f"{self._name}: the run ended before it was killed"
            if not list_runs(runs):
                return None
            run = find_run(None, runs)
            return run if self._round_begun(run) else None

        run = wait_for(begun, START_TIMEOUT_S, f"round {self._point.round_index} to begin")
        if not self._point.in_tool_call:
            time.sleep(self._point.delay * self._baseline.round_seconds())
        return run

    def _round_begun(self, run: RunFolder) -> bool:
        try:
            ledger = run.open_ledger()
        except LedgerError:
            return False  # the driver has not created it yet
        wanted = select(RoundRow.index).where(
            RoundRow.phase == "train", RoundRow.index == self._point.round_index
        )
        with ledger.session() as session:
            begun = session.scalar(wanted) is not None
        ledger.close()
        return begun

    def _kill(self, run: RunFolder, driver: subprocess.Popen[bytes]) -> int:
        """Returns the pid that got SIGKILL."""
        ledger = run.open_ledger()
        self._boxes |= box_ids(ledger)
        if self._point.target == "driver":
            pid = driver.pid
        elif self._point.target == "engine":
            pid = wait_for(lambda: _alive(run, "engine-0"), 30.0, "the engine")
        elif self._point.in_tool_call:
            return self._kill_in_call(run, driver)
        else:
            pid = wait_for(lambda: _alive(run, "runner-1"), 30.0, "a runner")
        os.kill(pid, signal.SIGKILL)
        return pid

    def _kill_in_call(self, run: RunFolder, driver: subprocess.Popen[bytes]) -> int:
        """A call takes a millisecond. So the boxes are stopped: a call that is open stays open, is
        seen in its worker's wait file, and the worker is killed. Nobody in a call: the boxes run on
        for a moment and are stopped again."""
        draw = random.Random(self._name)
        boxes = marked_processes(*box_ids(run.open_ledger()))
        while driver.poll() is None:
            with frozen(boxes):
                worker = worker_in_call(run.path, newer_than=time.time())
                if worker is not None:
                    os.kill(worker.pid, signal.SIGKILL)
                    return worker.pid
            time.sleep(draw.uniform(0.02, 0.2))
            boxes = marked_processes(*box_ids(run.open_ledger()))
        raise TimeoutError(f"{self._name}: the run ended without a tool call we could hold")


def _alive(run: RunFolder, name: str) -> int | None:
    """Pid of an actor that runs now."""
    pid = read_pids(run.path).get(name)
    return pid if pid is not None and process_alive(pid) else None


def wait_for_none(boxes: set[str], timeout_s: float = 10.0) -> list[int]:
    """Processes of the boxes that are still there after ``timeout_s``; [] as soon as none is."""
    deadline = time.monotonic() + timeout_s
    left = marked_processes(*boxes)
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = marked_processes(*boxes)
    return left
