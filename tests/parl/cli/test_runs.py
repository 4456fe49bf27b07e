"""Run folders: numbers, lookup, the lock of the driver."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import pytest
from pydantic import ValidationError

from infra.db.engine import open_ledger
from infra.errors import ConfigError, LedgerError
from parl.cli import main as cli
from parl.cli.launch import drive
from parl.cli.runs import create_run, find_run, list_runs, sole_driver
from parl.config import RunConfig
from parl.errors import RunError
from parl.store.store import Store


def config(parent, **run) -> RunConfig:
    return RunConfig.model_validate({"run": {"name": "t", "dir": str(parent), **run}})


def test_runs_are_numbered_and_found_again(tmp_path):
    """Ids count up; a run is found by id, by path, and as the latest; its config comes back."""
    first, second = create_run(config(tmp_path, seed=4)), create_run(config(tmp_path))
    assert [first.run_id, second.run_id] == ["t-001", "t-002"]
    assert find_run("t-001", tmp_path).config == first.config
    assert find_run(str(first.path), tmp_path / "elsewhere").path == first.path
    assert find_run(None, tmp_path).run_id in {"t-001", "t-002"}
    assert [path.name for path in list_runs(tmp_path)] == ["t-001", "t-002"]
    ledger = first.open_ledger()
    info = Store(ledger, "t-001").load_run()
    ledger.close()
    assert (info.status, info.seed, info.run_dir) == ("created", 4, str(first.path))


def test_an_unknown_run_names_the_nearest(tmp_path):
    create_run(config(tmp_path))
    with pytest.raises(ConfigError, match=r"known: t-001; did you mean 't-001'"):
        find_run("t-01", tmp_path)


def test_a_ledger_that_cannot_be_made_leaves_no_folder(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(LedgerError):
        create_run(config(tmp_path / "runs", ledger=f"sqlite:///{blocked}/ledger.db"))
    assert list_runs(tmp_path / "runs") == []


def test_two_drivers_do_not_share_a_run(tmp_path):
    """The second is refused with the pid of the first; a dead one holds nothing."""
    run = create_run(config(tmp_path))
    code = (
        "import sys, time; from pathlib import Path\n"
        "from parl.cli.runs import find_run, sole_driver\n"
        "with sole_driver(find_run(sys.argv[1], Path('.'))):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        with (
            pytest.raises(RunError, match=f"driven by process {child.pid} already"),
            sole_driver(run),
        ):
            pass
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with sole_driver(run):
        pass


def test_status_list_and_report_of_a_fresh_run(tmp_path, capsys):
    create_run(config(tmp_path))
    assert cli.run(["rl", "status", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("run t-001: created, 0/60 rounds, left ?")
    assert cli.run(["rl", "list", "--dir", str(tmp_path)]) == 0
    assert "t-001  created  0/60 rounds" in capsys.readouterr().out
    assert cli.run(["rl", "report", "t-001", "--dir", str(tmp_path)]) == 0
    assert (tmp_path / "t-001" / "report.md").is_file()


def test_show_takes_the_run_from_the_episode_id(tmp_path, capsys):
    """Tokens come with their text from the run's own vocabulary."""
    from infra.db.models import EpisodeRow

    run = create_run(config(tmp_path))
    create_run(config(tmp_path))
    ledger = open_ledger(run.ledger_url)
    with ledger.transaction() as session:
        session.add(
            EpisodeRow(
                id="t-001/train/00000/00000/000",
                run_id="t-001",
                phase="train",
                round_index=0,
                task_index=0,
                sample=0,
                task_name="x",
                task_type="add",
                prompt_ids=b"h\0\0\0i\0\0\0\x02\x01\0\0\xff\0\0\0",
            )
        )
    ledger.close()
    words = ["rl", "show", "t-001/train/00000/00000/000", "--dir", str(tmp_path)]
    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert "ids     104 105 258 255" in out and 'text    "hi<|im_end|>\\\\udcff"' in out


def test_doctor_looks_into_a_run(tmp_path, capsys):
    create_run(config(tmp_path))
    cli.run(["doctor", "t-001", "--dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert "run t-001: created, 0 rounds committed" in out
    assert "no worker has written a wait file yet" in out


def test_doctor_on_a_damaged_run_still_says_what_the_machine_has(tmp_path, capsys):
    folder = create_run(config(tmp_path))
    (folder.path / "ledger.db").write_bytes(b"no database")
    assert cli.run(["doctor", "t-001", "--dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "packages:" in shown.out and "sandbox:" in shown.out
    assert "ledger.db" in shown.err


def test_a_dead_driver_is_not_called_running(tmp_path, capsys):
    """Its last word in the ledger is "running"; the lock knows better."""
    folder = create_run(config(tmp_path))
    ledger = folder.open_ledger()
    Store(ledger, folder.run_id).set_run_status("running")
    ledger.close()
    with sole_driver(folder):
        pass
    assert cli.run(["rl", "list", "--dir", str(tmp_path)]) == 0
    assert "stopped (its driver is gone; go on with: parl rl resume" in capsys.readouterr().out
    with sole_driver(folder):
        assert cli.run(["rl", "status", "t-001", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("run t-001: running, 0/")


def test_a_damaged_run_does_not_hide_the_others(tmp_path, capsys):
    first, _ = create_run(config(tmp_path)), create_run(config(tmp_path))
    (first.path / "ledger.db").write_bytes(b"no database")
    assert cli.run(["rl", "list", "--dir", str(tmp_path)]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one.startswith(f"{first.path.parent}/t-001  unreadable: ")
    assert other.startswith(f"{first.path.parent}/t-002  created")


@pytest.mark.parametrize(
    "values", [{"name": "../x"}, {"name": ""}, {"name": "a b"}, {"seed": 2**40}, {"seed": 10**23}]
)
def test_names_and_seeds_that_cannot_be_are_refused(tmp_path, values):
    """A name is a folder's name; a seed is multiplied and still fits 63 bits."""
    with pytest.raises(ValidationError):
        config(tmp_path, **values)


def test_a_finished_run_gets_its_report_and_no_cluster(tmp_path):
    """Resuming it starts nothing."""
    folder = create_run(config(tmp_path))
    ledger = folder.open_ledger()
    Store(ledger, folder.run_id).set_run_status("finished")
    ledger.close()
    stream = io.StringIO()
    drive(folder, stream)
    assert "report  " in stream.getvalue() and "ray at" not in stream.getvalue()
    assert (folder.path / "report.md").exists()


def test_signals_are_heard_as_before_once_a_run_has_ended(tmp_path):
    """A command that follows in the same process hears Ctrl-C itself."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    folder = create_run(config(tmp_path))
    ledger = folder.open_ledger()
    Store(ledger, folder.run_id).set_run_status("finished")
    ledger.close()
    drive(folder, io.StringIO())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
