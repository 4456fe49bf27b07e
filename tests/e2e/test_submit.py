"""`parl rl submit` on a head node of this machine, with its token."""

from __future__ import annotations

import pytest

from infra.cluster.head import start_head
from tests.e2e.test_bad_input import CONFIG, EMPTY_RUN, ROOT, parl

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def head():
    with start_head(env={"PYTHONPATH": str(ROOT)}) as node:
        yield node


def submit(head, *overrides: str):
    words = [word for value in (*EMPTY_RUN, *overrides) for word in ("--set", value)]
    where = ["--address", head.jobs_address, "--auth-token", str(head.token_path)]
    return parl("rl", "submit", "--config", CONFIG, *words, *where)


def test_a_job_that_succeeds_exits_0_and_shows_its_log(head, tmp_path):
    """The run folder is where the submitter said, not in the job's temporary folder."""
    done = submit(head, f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "== finished test-001" in done.stdout
    assert (tmp_path / "test-001" / "report.md").is_file()


def test_a_job_that_fails_exits_1_with_the_cause_in_one_line(head, tmp_path):
    ledger = "run.ledger=sqlite:////proc/no-such-folder/ledger.db"
    done = submit(head, f"run.dir={tmp_path}", ledger)
    assert done.returncode == 1
    assert "no-such-folder" in done.stderr.strip().splitlines()[-1]


def test_a_wrong_configuration_costs_no_job(head):
    done = submit(head, "rounds.num_round=1")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "did you mean num_rounds?" in done.stderr
