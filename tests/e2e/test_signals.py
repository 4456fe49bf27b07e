"""SIGTERM is how schedulers and `timeout` say Ctrl-C: the run stops in order and goes on later."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_bad_input import parl

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("backend", "line", "number"),
    [
        ("local", "round 1/2", signal.SIGTERM),
        ("local", "round 1/2", signal.SIGINT),
        pytest.param("ray", "ray at", signal.SIGTERM, marks=pytest.mark.ray),
    ],
)
def test_a_stopped_run_says_so_and_is_resumed(
    tmp_path: Path, backend: str, line: str, number: signal.Signals
):
    """In a round, and while Ray starts its actors: Ray's own handler would abort the process."""
    command = [sys.executable, "-m", "parl.cli.main", "rl", "run"]
    for value in (
        f"run.dir={tmp_path}",
        f"backend={backend}",
        "rounds.num_rounds=2",
        "rounds.eval_episodes=0",
        "warm_start.clean_steps=2",
        "warm_start.sloppy_steps=0",
        "warm_start.num_demonstrations=8",
    ):
        command += ["--set", value]
    command += ["--config", "configs/test.toml"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None and driver.stderr is not None
        for text in driver.stdout:
            if text.startswith(line):
                break
        driver.send_signal(number)
        _, err = driver.communicate(timeout=120)
    assert driver.returncode == 128 + number, err
    *before, last = err.splitlines()
    assert "stopping: the engine and the boxes are being closed" in before, err
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    assert last.startswith(f"{word}; resume with: parl rl resume "), err
    status = parl("rl", "status", tmp_path / "test-001").stdout
    assert status.startswith("run test-001: stopped, ")
    if backend == "local":
        done = parl("rl", "resume", tmp_path / "test-001")
        assert done.returncode == 0, done.stderr
        assert parl("rl", "status", tmp_path / "test-001").stdout.startswith(
            "run test-001: finished, 2/2 rounds"
        )
