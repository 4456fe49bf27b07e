"""Our model through transformers' Auto classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import CheckpointError, NotSupportedError
from engine.model.auto import PolicyForCausalLM, register_modules
from engine.model.checkpoint.load import load_model
from engine.model.checkpoint.save import save_model
from engine.model.config import ModelConfig
from engine.model.dense import greedy
from tests.engine.model.hub import deepseek, saved
from tests.engine.tiny import MLA, MODEL, make_model


@pytest.fixture(autouse=True)
def registered() -> None:
    register_modules()
    register_modules()  # twice is once


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["parl_k25", "kimi_k2"])
def test_generate_and_back(config: ModelConfig, tmp_path: Path):
    """From a folder we saved: greedy text is ours, and save_pretrained writes the same tensors."""
    ends = config.model_copy(update={"eos_token_id": 82, "pad_token_id": 0})
    save_model(make_model(ends), tmp_path / "first")
    assert AutoConfig.from_pretrained(tmp_path / "first").vocab_size == 83
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype="auto")
    assert isinstance(model, PolicyForCausalLM) and model.policy.config == ends
    prompts = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row, prompt in zip(out, ([5, 6, 7], [9, 8, 7, 6, 5]), strict=True):
        expected = greedy(make_model(ends), prompt, 12, frozenset({82}))
        assert row[5 : 5 + len(expected)].tolist() == expected
    model.save_pretrained(tmp_path / "second")
    again = load_model(tmp_path / "second")
    first = make_model(ends).state_dict()
    assert again.config == ends
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.state_dict().items())


@torch.no_grad()
def test_loss_and_uncached_logits(tmp_path: Path):
    """labels give the loss that transformers' own class gives for the same tensors."""
    theirs = deepseek(2)
    model = PolicyForCausalLM.from_pretrained(
        _as_kimi(saved(theirs, tmp_path)), dtype=torch.float32
    )
    ids = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :9] = -100
    mine, expected = model(ids, labels=labels), theirs(ids, labels=labels, use_cache=False)
    assert mine.loss is not None and mine.logits is not None
    torch.testing.assert_close(mine.loss, expected.loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(mine.logits, expected.logits, rtol=0, atol=1e-4)
    with pytest.raises(NotSupportedError, match="output_attentions"):
        model(ids, output_attentions=True)
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 97)


def _as_kimi(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    return folder


def test_unknown_options_are_refused(tmp_path: Path):
    """An option that would be dropped silently, and fp16."""
    save_model(make_model(MLA), tmp_path)
    with pytest.raises(CheckpointError, match="quantization_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config={"a": 1})
    with pytest.raises(CheckpointError, match="65,504"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="expected the folder alone"):
        AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path, a=1)
