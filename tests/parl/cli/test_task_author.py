"""``parl task`` from new to publish, on a registry and a key of the test's own."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from infra.db.engine import open_ledger
from parl.cli import main as cli
from parl.store.tasks import TaskRegistry
from sandbox.check.certificate import require_certificate
from tests.sandbox.conftest import best_level

FORMATS = Path(__file__).parents[2] / "data" / "formats"


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv("PARL_REGISTRY", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert cli.run(["task", "new", "acme/demo", "--family", "python", "--dir", str(tmp_path)]) == 0
    return tmp_path / "demo"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("task.toml", "call_timeout_s = 10", "call_timeout_s = inf", "call_timeout_s' = inf"),
        ("environment/data.json", "", "[" * 100_000, "not valid JSON"),
        ("solution/calls.jsonl", "", "[" * 100_000, "not valid JSON"),
    ],
)
def test_what_cannot_be_a_task_is_one_line(
    folder: Path, file: str, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """Endless or nested too deep: exit 2, the file and what is wrong."""
    capsys.readouterr()
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) if old else new)
    assert cli.run(["task", "run", str(folder), "--agent", "oracle"]) == 2
    err = capsys.readouterr().err
    assert file in err and said in err and len(err.splitlines()) == 1


def test_a_deep_line_in_the_shell_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A line that is no call changes nothing, however it is broken."""
    best_level()
    monkeypatch.setattr("sys.stdin", io.StringIO("[" * 100_000 + "\n" + '{"final_text": "x"}\n'))
    assert cli.run(["task", "run", str(folder), "--agent", "shell"]) == 1
    out, err = capsys.readouterr()
    assert "not JSON" in out + err and "verdict" in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_hold_its_certificate_is_not_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    folder.chmod(0o500)
    assert cli.run(["task", "check", str(folder), "--repeat", "5"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_name_longer_than_file_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["task", "new", "a" * 300, "--family", "python", "--dir", str(tmp_path)]
    assert cli.run(words) == 2
    assert "at most 100" in capsys.readouterr().err


def test_from_new_to_published(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """check certifies, publish makes version 1 and refuses it again, list, show and export tell."""
    best_level()
    report = tmp_path / "report.json"
    words = ["task", "check", str(folder), "--repeat", "5", "--json", str(report)]
    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert "passed\ncertificate" in out and json.loads(report.read_text())["passed"] is True
    certificate = require_certificate(folder)
    ledger = open_ledger(f"sqlite:///{tmp_path}/share/parl/tasks.db", create=False)
    assert TaskRegistry(ledger).certificates(certificate.content_hash) == [certificate]
    ledger.close()
    assert cli.run(["task", "publish", str(folder)]) == 0
    assert "published acme/demo@1" in capsys.readouterr().out
    assert cli.run(["task", "publish", str(folder)]) == 2
    assert "published already" in capsys.readouterr().err
    assert cli.run(["task", "list"]) == 0
    assert "acme/demo@1  tools: list_items, set_price" in capsys.readouterr().out
    assert cli.run(["task", "show", "acme/demo@1"]) == 0
    assert certificate.id in capsys.readouterr().out
    assert cli.run(["task", "export", "acme/demo", str(tmp_path / "copy")]) == 0
    require_certificate(tmp_path / "copy")


def test_few_repeats_pass_without_a_certificate(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Two runs say too little; the message tells how many are needed."""
    best_level()
    assert cli.run(["task", "check", str(folder), "--repeat", "2"]) == 0
    assert "not certified: --repeat 2" in capsys.readouterr().err
    assert not (folder / ".parl").exists()


def test_the_report_s_place_is_tried_before_the_check(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A check takes minutes; its report must not be lost at the end."""
    words = ["task", "check", str(folder), "--json", str(tmp_path / "none" / "r.json")]
    assert cli.run(words) == 2
    said = capsys.readouterr().err
    assert "none/r.json: No such file" in said and "oracle" not in said


def test_a_flaw_exits_1_and_names_itself(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """--json - prints nothing but the report; no certificate is written."""
    (folder / "solution" / "calls.jsonl").unlink()
    assert cli.run(["task", "check", str(folder), "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["steps"][0]["findings"][0]["rule"] == "no-solution"
    assert not (folder / ".parl").exists()
    assert cli.run(["task", "publish", str(folder)]) == 2
    assert "has no certificate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "nowhere"], "is neither a folder nor a shipped family"),
        (["check", "lookup_calc/ad"], "known: lookup, add"),
        (["check", ".", "--backend", "Z"], "--backend 'Z'"),
        (["new", "x", "--family", "perl"], "one of python, http, mcp, bash"),
        (["run", "lookup_calc/add", "--agent", "me"], "oracle, nop, shell, engine"),
        (["import", "bfcl", "nowhere", "out"], "does not exist"),
        (["export", "acme/none", "out"], "no task registry"),
        (["publish", "nowhere"], "has no certificate"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["task", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_a_person_can_drive_a_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Calls, one and several a line, and an answer; what is neither is said and goes on."""
    best_level()
    calls = [
        {"name": "set_price", "arguments": {"item": item, "price": price}}
        for item, price in (("bolt M6", 144), ("cable 2 m", 828), ("lamp", 2820))
    ]
    lines = [
        "set the price, please", "3", '{"calls": [{"arguments": {}}]}',
        json.dumps(calls[0]), json.dumps({"calls": calls[1:]}),
        json.dumps({"final_text": "3"}),
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.run(["task", "run", str(folder), "--agent", "shell"]) == 0
    seen = capsys.readouterr()
    assert "cable 2 m: price 828" in seen.out and "verdict      pass" in seen.out
    said = [line for line in seen.err.splitlines() if 'a line is {"name": "TOOL"' in line]
    starts = ("not JSON (", "not a JSON object; ", "neither calls nor an answer; ")
    assert len(said) == 3
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True))


@pytest.mark.parametrize(("agent", "code"), [("oracle", 0), ("nop", 1)])
def test_oracle_and_nop_play_shipped_tasks(
    agent: str, code: int, capsys: pytest.CaptureFixture[str]
):
    """The exit code is the verdict."""
    best_level()
    assert cli.run(["task", "run", "lookup_calc/add", "--agent", agent, "--index", "2"]) == code
    assert f"verdict      {'pass' if code == 0 else 'fail'}" in capsys.readouterr().out


def test_import_prints_downgrades_and_what_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = FORMATS / "bfcl" / "simple.jsonl"
    assert cli.run(["task", "import", "bfcl", str(source), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "downgrade: tools do nothing" in out and "skipped: simple.jsonl:3" in out
    assert "2 tasks, 3 downgrades, 2 skipped" in out
