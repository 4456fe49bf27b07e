"""The report room reads ledgers and writes text and pictures; numbers come from rows alone."""

from __future__ import annotations

import pytest

from infra.db.engine import open_ledger
from infra.db.models import RunRow
from infra.errors import LedgerError
from parl.report.episode import episode_text, read_episode
from parl.report.history import read_history
from parl.report.status import status_text
from parl.report.table import as_text, before_after
from parl.report.write import write_report
from tests.parl.report.synthetic import EPISODE_ID, RUN_ID, make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ledger(folder):
    ledger = make_run(folder, num_rounds=12, per_type=8)
    yield ledger
    ledger.close()


def test_history_counts_what_the_episode_rows_say(ledger):
    """Success, tokens and gates of a round equal a plain count over its rows."""
    history = read_history(ledger, RUN_ID)
    assert [report.index for report in history.rounds] == list(range(12))
    assert history.episode_states == {"trained": (12 + 2) * 16}
    with ledger.session() as session:
        from infra.db.models import EpisodeRow

        rows = session.query(EpisodeRow).filter_by(phase="train", round_index=4, task_type="add")
        correct = [row.correctness for row in rows]
        tokens = sum(row.num_tokens for row in rows)
    report = history.rounds[4]
    assert report.success["add"] == sum(correct) / 8
    assert report.tokens_per_solved["add"] == tokens / sum(correct)
    assert report.mean_tokens["add"] == tokens / 8
    assert report.gate_open == {"lookup": True, "add": False}
    assert report.metrics["grad_norm"] == 1.5
    assert report.seconds["total"] == pytest.approx(1.5)


def test_table_compares_the_two_evaluations(ledger):
    """Rates change in points, tokens in percent."""
    text = as_text(before_after(read_history(ledger, RUN_ID)))
    lines = text.splitlines()
    assert lines[0].split() == ["held-out", "before", "after", "change"]
    assert lines[2].startswith("success") and "+0." in lines[2]
    assert "%" in next(line for line in lines if line.startswith("tokens per episode"))


def test_report_files_are_written(ledger, folder):
    """report.md, a real PNG and the table; a second call overwrites them."""
    write_report(ledger, RUN_ID, folder)
    files = write_report(ledger, RUN_ID, folder)
    assert files.curves.read_bytes().startswith(b"\x89PNG")
    text = files.report.read_text()
    assert "| success |" in text and "![curves](curves.png)" in text and "0123456789abcdef" in text
    assert files.table.read_text().strip() == files.text


def test_report_of_a_run_without_rounds(tmp_path):
    """A run that died before its first round still gets a report and says so."""
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    with ledger.transaction() as session:
        session.add(RunRow(id="r", name="r", kind="rl", status="failed", seed=0, error="boom"))
    files = write_report(ledger, "r", tmp_path)
    ledger.close()
    assert "boom" in files.report.read_text()
    assert files.text == ""


def test_status_says_where_a_run_stands(ledger):
    first, *rest = status_text(read_history(ledger, RUN_ID)).splitlines()
    assert first.startswith(f"run {RUN_ID}: finished, 12/40 rounds, left ")
    assert any(line.startswith("round 12/40") for line in rest)
    assert any(line.startswith("episodes  trained 224") for line in rest)


def test_unknown_run_lists_the_known_ones(ledger):
    with pytest.raises(LedgerError, match="holds no run 'nope'; it holds: demo-001"):
        read_history(ledger, "nope")


def test_show_is_complete(ledger):
    """Every token with id, mask and logprob; calls; observation; reward parts; reasons; draws."""
    record = read_episode(ledger, RUN_ID, "train/00000/00000/000")
    text = episode_text(record, lambda ids: "".join(chr(i) if i > 31 else f"<{i}>" for i in ids))
    for piece in (
        EPISODE_ID,
        "ids     1 2 3",
        '     65     1   -0.2500  "A"',
        '      7     0   -0.5000  "<7>"',
        "ids     10 11",
        'wrote "functions.lookup:0" "{\\"key\\":\\"a\\"}"',
        'ran lookup({"key": "a"}) in 1.2 ms',
        "repairs trailing comma",
        "part    correctness = 1.0",
        "reason  gate closed: budget not enforced",
        '"stream": 0',
        "version 0",
    ):
        assert piece in text, f"{piece!r} not in\n{text}"


@pytest.mark.parametrize("reference", [EPISODE_ID, "train/00000/00000/000", "0/0/0", "train/0/0/0"])
def test_an_episode_has_short_names(ledger, reference):
    assert read_episode(ledger, RUN_ID, reference).episode.id == EPISODE_ID


def test_unknown_episode_names_the_nearest(ledger):
    with pytest.raises(LedgerError, match=r"no episode 'train/00000/00000/099'.*00000/00"):
        read_episode(ledger, RUN_ID, "train/00000/00000/099")
