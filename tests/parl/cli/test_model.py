"""``parl model``: every verb on a tiny checkpoint, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.model.checkpoint.load import load_model
from engine.model.checkpoint.save import save_model
from parl.cli.main import run
from tests.engine.tiny import MLA, MODEL, make_model

DENSE = MODEL.model_copy(update={"first_k_dense_replace": 3})


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of the released shape, and of a folder with what its tensors are stored as."""
    assert run(["model", "info", "kimi-k2.5"]) == 0
    text = capsys.readouterr().out
    assert "1.026 T, active 32.86 B (31.69 B without" in text
    assert "70272 bytes a token" in text and "384 of which 8, 1 shared, in 60 layers" in text
    save_model(make_model(MLA), tmp_path / "m")
    assert run(["model", "info", str(tmp_path / "m")]) == 0
    assert "stored as     F32 x" in capsys.readouterr().out


def test_convert_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A folder of another type that transformers reads with the same logits."""
    save_model(make_model(MLA), tmp_path / "m")
    (tmp_path / "m/tokenizer.json").write_text("{}")
    arguments = ["--dtype", "float32", "--type", "deepseek_v3"]
    assert run(["model", "convert", str(tmp_path / "m"), str(tmp_path / "out"), *arguments]) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert run(["model", "verify", str(tmp_path / "out"), "--reference"]) == 0
    text = capsys.readouterr().out
    assert "of the right shape, finite" in text and "largest difference from transformers" in text


def test_a_folder_with_files_is_somebodys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Neither convert nor upcycle writes over anything, or where no folder can be."""
    save_model(make_model(DENSE), tmp_path / "dense")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for verb in ("convert", "upcycle"):
        assert run(["model", verb, str(tmp_path / "dense"), str(tmp_path / "mine")]) == 2
        assert "is not empty (notes.txt)" in capsys.readouterr().err
        below = tmp_path / "mine/notes.txt/x"
        assert run(["model", verb, str(tmp_path / "dense"), str(below)]) == 2
        assert "expected a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rms_norm_eps", None, "config.json has no rms_norm_eps, which deepseek_v3 needs"),
        ("n_group", None, "config.json has no n_group"),
        ("hidden_size", "32", "hidden_size='32': expected a number"),
    ],
)
def test_no_default_stands_in_for_a_field(
    name: str, value: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """transformers' default may be another number, and convert would keep ours."""
    save_model(make_model(MLA), tmp_path / "m", model_type="deepseek_v3")
    path = tmp_path / "m/config.json"
    config = json.loads(path.read_text())
    del config[name]
    path.write_text(json.dumps(config if value is None else {**config, name: value}))
    assert run(["model", "verify", str(tmp_path / "m")]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_our_own_type_has_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Only we have experts behind grouped-query attention."""
    save_model(make_model(MODEL), tmp_path / "m")
    assert run(["model", "verify", str(tmp_path / "m"), "--reference"]) == 2
    assert "transformers has no model of type parl_k25" in capsys.readouterr().err


def test_upcycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Dense in, experts out."""
    save_model(make_model(DENSE), tmp_path / "dense")
    arguments = [str(tmp_path / "dense"), str(tmp_path / "moe"), "--experts", "4", "--top-k", "2"]
    assert run(["model", "upcycle", *arguments]) == 0
    assert "in 3 expert layers, 4 of which 2" in capsys.readouterr().out
    assert load_model(tmp_path / "moe").config.n_routed_experts == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "nowhere"], "nowhere/config.json: No such file"),
        (["verify", "nowhere"], "expected a hub folder"),
        (["upcycle", "nowhere", "out", "--experts", "2", "--top-k", "3"], "No such file"),
        (["convert", "x.gguf", "out"], "x.gguf is not a readable GGUF file"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Exit code 2, what and where."""
    monkeypatch.chdir(tmp_path)
    assert run(["model", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
