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


SEED = """
model:
  path: "/models/kimi-k2.5"
  dtype: "bfloat16"
kv_cache:
  hot_size: 2048
  warm_compress: true
  cold_summary: true
  warm_quant_bits: 8
attention:
  window_size: 1024
  sparse_topk: 64
  summary_weight: 0.7
runtime:
  max_batch_size: 16
  prefill_chunk_size: 4096
"""


def test_the_seeds_lightengine_yaml_is_taken_as_it_is(tmp_path, capsys):
    """Every key of it says something; --set still wins."""
    file = tmp_path / "lightengine.yaml"
    file.write_text(SEED)
    words = ["serve", "-c", str(file), "--set", "listen.port=1234", "--dry-run"]
    assert cli.run(words) == 0, capsys.readouterr().err
    read = tomllib.loads(capsys.readouterr().out)
    attention = read["model"]["attention"]
    hybrid = attention["hybrid"]
    assert read["model"]["path"] == "/models/kimi-k2.5"
    assert (read["engine"]["weights"], read["engine"]["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert (attention["mode"], attention["hot"], attention["profile"]) == ("hybrid", 2048, "k8v8")
    assert (hybrid["window"], hybrid["topk"], hybrid["summary_weight"]) == (1024, 64, 0.7)
    assert read["user"]["summaries"] is True
    assert (read["router"]["max_running"], read["engine"]["max_rows"]) == (16, 4096)
    assert read["listen"]["port"] == 1234


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kv_cache: {hot_sise: 1}", "unknown key kv_cache.hot_sise; expected one of hot_size"),
        ("kv_cashe: {}", "unknown section 'kv_cashe'"),
        ("kv_cache: {warm_quant_bits: 3}", "kv_cache.warm_quant_bits = 3, expected 8 or 4"),
        ("model: {dtype: float16}", "expected bfloat16 or float32"),
        ("[1", "expected a lightengine.yaml"),
    ],
)
def test_what_a_lightengine_yaml_must_not_say(text, reason, tmp_path, capsys):
    file = tmp_path / "lightengine.yaml"
    file.write_text(text)
    assert cli.run(["serve", "-c", str(file), "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert reason in err and len(err.splitlines()) == 1


def test_naming_one_key_leaves_the_others(capsys):
    """A server's engine has defaults of its own; one key does not bring back a run's."""
    assert cli.run(["serve", *TINY, "--dry-run"]) == 0
    plain = tomllib.loads(capsys.readouterr().out)["engine"]
    assert cli.run(["serve", *TINY, "--set", "engine.max_rows=256", "--dry-run"]) == 0
    changed = tomllib.loads(capsys.readouterr().out)["engine"]
    assert changed == {**plain, "max_rows": 256}
    assert (plain["max_context"], plain["deterministic"]) == (4096, False)
