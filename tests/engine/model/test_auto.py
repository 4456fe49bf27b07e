"""Our model through transformers' Auto classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import CheckpointError, EngineError, NotSupportedError
from engine.model.auto import PolicyForCausalLM, register_modules
from engine.model.checkpoint.hub_config import from_hub
from engine.model.checkpoint.load import load_model
from engine.model.checkpoint.save import save_model
from engine.model.config import ModelConfig, YarnConfig
from engine.model.dense import forward_dense, greedy
from engine.model.upcycle import upcycle
from tests.engine.model.hub import RELEASED, deepseek, k25_folder, released_folder, saved
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
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for options, words in (
        ({"a": 1}, "a=1; expected only the folder, model_type and max_shard_size"),
        ({"safe_serialization": False}, "written as safetensors only"),
        ({"max_shard_size": "5 parsec"}, "max_shard_size='5 parsec', expected bytes"),
    ):
        with pytest.raises(CheckpointError, match=words):
            model.save_pretrained(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


YARN = YarnConfig(factor=64.0, original_max_position_embeddings=64, mscale_all_dim=1.0)


@torch.no_grad()
def test_yarn_of_the_released_config(tmp_path: Path):
    """The words of the released text_config arrive: the Auto classes give our loader's logits."""
    folder = released_folder(tmp_path)
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == 4096
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.policy.config == from_hub(RELEASED)
    assert model.policy.config.rope_scaling == YARN
    ids = torch.randint(0, 83, (1, 90), generator=torch.Generator().manual_seed(0))
    hidden, _ = forward_dense(load_model(folder), ids, torch.ones_like(ids, dtype=torch.bool))
    expected = load_model(folder).logits(hidden)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.policy.config == from_hub(RELEASED)


def test_yarn_of_an_upcycled_llama(tmp_path: Path):
    """parl_k25 with YaRN: grouped-query attention with experts."""
    dense = MODEL.model_copy(update={"first_k_dense_replace": 3, "rope_scaling": YARN})
    experts = upcycle(make_model(dense), 4, 2)
    save_model(experts, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "parl_k25" and model.policy.config == experts.config
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert out[0, 3:].tolist() == greedy(experts, [5, 6, 7], 3, frozenset())


def test_a_multimodal_folder_gives_its_text_model(tmp_path: Path):
    """Through our class: transformers' own kimi_k25 wants the vision tower too."""
    model = PolicyForCausalLM.from_pretrained(k25_folder(tmp_path))
    assert model.policy.config == from_hub(RELEASED) and model.config.model_type == "kimi_k2"


def test_config_overrides_are_applied(tmp_path: Path):
    """As a field, as a config, and refused where the tensors do not fit."""
    save_model(make_model(MLA), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, rms_norm_eps=1e-3)
    assert model.policy.config.rms_norm_eps == model.policy.norm.eps == 1e-3
    config = AutoConfig.from_pretrained(tmp_path)
    config.routed_scaling_factor = 9.0
    model = PolicyForCausalLM.from_pretrained(tmp_path, config=config)
    assert model.policy.config.routed_scaling_factor == 9.0
    with pytest.raises(CheckpointError, match="num_hidden_layers=4"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=4)


def test_options_that_ask_for_what_is_done(tmp_path: Path):
    """Accepted; torch_dtype is dtype."""
    save_model(make_model(MLA), tmp_path)
    usual = {"low_cpu_mem_usage": True, "local_files_only": True, "use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.bfloat16, **usual)
    assert model.policy.norm.weight.dtype is torch.bfloat16
    model.save_pretrained(tmp_path / "out", safe_serialization=True, model_type="deepseek_v3")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "deepseek_v3"


def test_every_end_of_text_is_kept(tmp_path: Path):
    """In config.json and in generation_config.json, through load and save."""
    folder = released_folder(tmp_path, eos_token_id=[82, 81])
    (folder / "generation_config.json").write_text('{"eos_token_id": [82, 81], "top_p": 0.9}')
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.policy.config.eos_token_id == 82
    model.save_pretrained(tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [82, 81]


def test_embeddings_are_the_parameters(tmp_path: Path):
    """A view, not a copy; another vocabulary and ids outside it are refused."""
    save_model(make_model(MLA), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.get_input_embeddings().weight is model.policy.embed_tokens
    assert model.get_output_embeddings().weight is model.policy.lm_head
    with pytest.raises(NotSupportedError, match="vocabulary of a policy is fixed"):
        model.set_input_embeddings(torch.nn.Embedding(2, 2))
    for token in (-1, 83):
        with pytest.raises(EngineError, match=f"holds {token}, the model knows 0 to 82"):
            model(torch.tensor([[1, token]]))
