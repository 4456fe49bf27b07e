"""``parl model``: every verb on a tiny checkpoint, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.chat.kimi import K2Renderer, K25Renderer
from engine.chat.load import load_renderer
from engine.model.checkpoint.load import load_model
from engine.model.checkpoint.save import save_model
from parl.cli.main import run
from tests.engine.chat.dialogues import SMALL_RANKS
from tests.engine.model.checkpoint.test_gguf import write_gguf
from tests.engine.model.checkpoint.test_quantised import quantised_folder
from tests.engine.model.hub import k25_folder, llama, released_folder, saved
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
        (["info", "nowhere"], "no preset; expected a hub folder, a .gguf file or one of kimi-k2.5"),
        (["info", "kimi-k25"], "did you mean kimi-k2.5?"),
        (["info", "demo", "--context", "-5"], "--context"),
        (["upcycle", "nowhere", "out", "--seed", "-1"], "--seed"),
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


def test_info_needs_no_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """config.json alone is enough."""
    folder = released_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert run(["model", "info", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "mla, 3 layers of 48" in text and "stored as" not in text


@pytest.mark.parametrize("kind", ["kimi_k2", "kimi_k25", "llama", "int4", "fp8"])
def test_the_reference_of_what_transformers_cannot_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Compared with DeepseekV3 or Llama, from tensors that were all found; YaRN included."""
    if kind == "kimi_k2":
        folder = released_folder(tmp_path / "m")
    elif kind == "kimi_k25":
        folder = k25_folder(tmp_path / "m")
    elif kind == "llama":
        folder = saved(llama(), tmp_path / "m")
    else:
        folder, _ = quantised_folder(tmp_path, kind)
    assert run(["model", "verify", str(folder), "--reference"]) == 0, capsys.readouterr().err
    assert "largest difference from transformers" in capsys.readouterr().out


def test_a_converted_k25_keeps_its_chat_format(tmp_path: Path):
    """Its text part is a kimi_k2, which K2 is too; and after another conversion."""
    folder = k25_folder(tmp_path / "m")
    (folder / "tiktoken.model").write_bytes(SMALL_RANKS.read_bytes())
    assert isinstance(load_renderer(folder), K25Renderer)
    for source, target in (("m", "one"), ("one", "two")):
        words = ["convert", str(tmp_path / source), str(tmp_path / target)]
        assert run(["model", *words]) == 0
        assert isinstance(load_renderer(tmp_path / target), K25Renderer)
    plain = released_folder(tmp_path / "k2")
    (plain / "tiktoken.model").write_bytes(SMALL_RANKS.read_bytes())
    assert isinstance(load_renderer(plain), K2Renderer)


def test_every_end_of_text_is_kept(tmp_path: Path):
    """convert writes the list again."""
    folder = released_folder(tmp_path / "m", eos_token_id=[82, 81])
    assert run(["model", "convert", str(folder), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [82, 81]


def test_a_gguf_whose_vocabulary_we_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The model is written, and the user is told what it lacks."""
    path = write_gguf(tmp_path / "m.gguf")
    for verb in ("convert", "upcycle"):
        assert run(["model", verb, str(path), str(tmp_path / verb)]) == 0
        assert "without a tokenizer: this GGUF has a 'llama' vocab" in capsys.readouterr().out
        assert load_model(tmp_path / verb).config.vocab_size == 10
        assert not (tmp_path / verb / "tokenizer.json").exists()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A tokenizer that cannot be copied is found before the tensors are written."""
    folder = released_folder(tmp_path / "m")
    (folder / "tokenizer.json").mkdir()
    (folder / "tokenizer.json/inside").write_text("")
    assert run(["model", "convert", str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "Is a directory; nothing was kept" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
