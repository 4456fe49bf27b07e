"""The command line: help is instant, errors are one line, exit codes are 0, 1 and 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from infra.errors import ConfigError, LedgerError
from parl.cli import main as cli


def test_importing_the_command_imports_nothing_heavy():
    """Help and completion must be instant: a fresh interpreter loads no torch, ray or SQL."""
    code = (
        "import sys, parl.cli.main\n"
        "heavy = {'torch', 'ray', 'sqlalchemy', 'matplotlib', 'pydantic', 'numpy'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"imported: {done.stderr}"


@pytest.mark.parametrize("words", [["--help"], ["rl", "--help"], ["rl", "run", "--help"]])
def test_help_exits_0(words, capsys):
    assert cli.run(words) == 0
    assert "Usage: parl" in capsys.readouterr().out


def test_a_noun_alone_prints_its_verbs(capsys):
    assert cli.run(["rl"]) == 2
    assert "resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rl", "runn"], "Did you mean 'run'"),
        (["rl", "run"], "Missing option '--config'"),
        (["rl", "run", "--confg", "x"], "No such option"),
        (["task", "show", "lookup_calc/ad"], "did you mean 'lookup_calc/add'?"),
        (["rl", "status", "--dir", "/nonexistent"], "no run in /nonexistent/"),
    ],
)
def test_wrong_words_exit_2_with_one_line(words, said, capsys):
    assert cli.run(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.fixture
def failing(monkeypatch):
    """``parl fail`` raises what the test asks for."""

    def install(error: BaseException) -> None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.callback()
        def root() -> None: ...

        @app.command()
        def fail() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)

    return install


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad\nvalue"), 2, "parl: bad value\n"),
        (LedgerError("disk full"), 1, "parl: disk full\n"),
        (
            ZeroDivisionError("x"),
            1,
            "parl: ZeroDivisionError: x (unexpected; run again with --debug to see where)\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_line_and_a_code(failing, capsys, error, code, line):
    failing(error)
    assert cli.run(["fail"]) == code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback_wherever_it_stands(failing, capsys):
    failing(LedgerError("disk full"))
    assert cli.run(["fail", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.rstrip().endswith("parl: disk full")


def test_task_list_and_show(capsys):
    assert cli.run(["task", "list"]) == 0
    assert "lookup_calc/add  tools: lookup, calc" in capsys.readouterr().out
    assert cli.run(["task", "show", "add", "--heldout", "--index", "3"]) == 0
    out = capsys.readouterr().out
    assert "heldout #3" in out and "oracle 3" in out and "answer" in out


def test_doctor_says_what_is_there_and_which_level_applies(capsys):
    """--json carries the same facts; 0 or 1 says whether an isolating level works."""
    code = cli.run(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert code == (0 if facts["sandbox"]["level"] else 1)
    assert {level["level"] for level in facts["sandbox"]["levels"]} == {
        "A",
        "B",
        "C",
        "docker",
        "ray",
    }
    assert all(level["reason"] for level in facts["sandbox"]["levels"])
    names = {item["name"]: item["version"] for item in facts["packages"]}
    assert names["torch"] and names["ray"]


def test_doctor_without_bubblewrap_fails_with_the_remedy(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "no isolating level works here: install bubblewrap" in out
