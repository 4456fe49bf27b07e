"""One small run through the real command, and every question one can ask about it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.db.engine import open_ledger
from infra.db.models import EpisodeRow
from tests.e2e.test_bad_input import parl, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds and two evaluations in process, after a short warm start."""
    runs = tmp_path_factory.mktemp("runs")
    overrides = ("backend=local", "rounds.num_rounds=2", "warm_start.clean_steps=30")
    done = run(runs, *overrides)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("round 2/2 | success add ") for line in lines)
    assert any(line.startswith("tokens per solved task") for line in lines)
    return runs / "test-001"


def test_the_run_folder_is_complete(folder):
    names = {path.name for path in folder.iterdir()}
    wanted = {"config.toml", "ledger.db", "log.jsonl", "metrics.jsonl", "checkpoints", "weights"}
    assert wanted | {"report.md", "curves.png", "table.txt", "waits-local.json"} <= names


def test_status_says_finished(folder):
    done = parl("rl", "status", folder)
    assert done.stdout.startswith("run test-001: finished, 2/2 rounds, left 0:00")
    assert "episodes  trained 32, finished 16" in done.stdout
    assert "0 leases held" in done.stdout


def test_show_prints_every_sampled_token_with_mask_and_logprob(folder):
    """The number of token lines is the number of sampled tokens the ledger counts."""
    ledger = open_ledger(f"sqlite:///{folder / 'ledger.db'}", create=False)
    with ledger.session() as session:
        row = session.get(EpisodeRow, "test-001/train/00001/00002/003")
    ledger.close()
    assert row is not None
    out = parl("rl", "show", "1/2/3", "--run", folder).stdout
    fields = [line.split() for line in out.splitlines() if line.startswith("     ")]
    tokens = [f for f in fields if len(f) >= 4 and f[0].isdecimal() and f[1] in "01"]
    assert len(tokens) == row.num_tokens > 0
    assert "weights   version 1" in out and f"reward    {row.reward}" in out


def test_rescore_gives_the_same_rewards(folder):
    done = parl("rl", "rescore", folder)
    assert done.returncode == 0
    assert done.stdout == "32 rewards of 2 rounds computed again, 0 differ\n"


def test_rescore_notices_a_changed_reward(folder):
    ledger = open_ledger(f"sqlite:///{folder / 'ledger.db'}", create=False)
    with ledger.transaction() as session:
        row = session.get(EpisodeRow, "test-001/train/00000/00000/000")
        assert row is not None
        before, row.reward = row.reward, 0.123
    done = parl("rl", "rescore", folder)
    with ledger.transaction() as session:
        row = session.get(EpisodeRow, "test-001/train/00000/00000/000")
        assert row is not None
        row.reward = before
    ledger.close()
    assert done.returncode == 1
    assert "test-001/train/00000/00000/000: ledger 0.123" in done.stdout


def test_resuming_a_finished_run_changes_nothing(folder):
    table = (folder / "table.txt").read_text()
    done = parl("rl", "resume", folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "table.txt").read_text() == table
