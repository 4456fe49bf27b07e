"""``parl serve``: configuration, presets, refusals; what it serves: tests/engine/server."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from parl.cli import main as cli

ROOT = Path(__file__).parents[3]
PRESETS = sorted((ROOT / "configs" / "serve").glob("*.toml"))
TINY = ["--set", "model.preset=demo", "--set", "model.tokenizer=bytes"]


def test_there_is_a_preset_for_each_scenario():
    assert [path.stem for path in PRESETS] == ["ecommerce", "legal", "support"]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_dry_run_prints_what_would_be_served(path, capsys, tmp_path):
    """The whole configuration, which reads back as itself."""
    assert cli.run(["serve", "-c", str(path), *TINY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    read = tomllib.loads(out)
    assert read["limits"]["max_concurrent"] >= 16 and read["model"]["preset"] == "demo"
    (tmp_path / "again.toml").write_text(out)
    assert cli.run(["serve", "-c", str(tmp_path / "again.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "model is missing"),
        (["--set", "model.seed=1"], "expected either model.path"),
        (["--set", "model.preset=demo"], "a preset has no tokenizer of its own"),
        ([*TINY, "--set", "limits.max_tokenz=1"], "limits.max_tokenz"),
        ([*TINY, "--set", "listen.port=99999"], "listen.port"),
        ([*TINY, "--set", "listen.host=0.0.0.0"], "beyond loopback and there are no API keys"),
        ([*TINY, "--set", "listen.keys_file=/nonexistent"], "listen.keys_file /nonexistent"),
        (["-c", "/nonexistent.toml"], "no such file"),
    ],
)
def test_refusals_are_one_line(words, reason, capsys, monkeypatch):
    monkeypatch.delenv("PARL_SERVE_KEYS", raising=False)
    assert cli.run(["serve", *words]) == 2
    err = capsys.readouterr().err
    assert reason in err and len(err.splitlines()) == 1
