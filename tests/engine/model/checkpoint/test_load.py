"""Hub folders: spelling, order of shards, bounded memory, and what is wrong with a bad one."""

from __future__ import annotations

import json
import resource
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.checkpoint.hub_config import to_hub
from engine.model.checkpoint.load import load_model, load_tensors, open_checkpoint
from engine.model.checkpoint.names import hub_shapes
from engine.model.checkpoint.save import convert, save_model
from engine.model.checkpoint.source import Entry
from engine.model.config import ModelConfig
from tests.engine.tiny import MLA, MODEL, make_model


def folder_of(tmp_path: Path, config: ModelConfig = MODEL, **options: Any) -> Path:
    save_model(make_model(config), tmp_path / "model", **options)
    return tmp_path / "model"


def rewrite(folder: Path, change: Any) -> None:
    """Load the only shard, change its dict, write it again."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, yours = model.state_dict(), other.state_dict()
    return list(mine) == list(yours) and all(torch.equal(mine[n], yours[n]) for n in mine)


def test_names_are_those_of_the_released_checkpoints():
    """Dense layer 0, expert layers after it, latent attention, router, embedding and head."""
    shapes = hub_shapes({n: tuple(t.shape) for n, t in make_model(MLA).state_dict().items()})
    width, hidden = MLA.moe_intermediate_size, MLA.hidden_size
    expected = {
        "model.embed_tokens.weight": (83, hidden),
        "lm_head.weight": (83, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_a_proj.weight": (20, hidden),
        "model.layers.0.self_attn.q_a_layernorm.weight": (20,),
        "model.layers.0.self_attn.q_b_proj.weight": (48, 20),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (16, hidden),
        "model.layers.0.self_attn.kv_a_layernorm.weight": (12,),
        "model.layers.0.self_attn.kv_b_proj.weight": (64, 12),
        "model.layers.0.self_attn.o_proj.weight": (hidden, 32),
        "model.layers.0.mlp.gate_proj.weight": (MLA.intermediate_size, hidden),
        "model.layers.1.mlp.gate.weight": (5, hidden),
        "model.layers.1.mlp.gate.e_score_correction_bias": (5,),
        "model.layers.1.mlp.experts.4.up_proj.weight": (width, hidden),
        "model.layers.1.mlp.experts.4.down_proj.weight": (hidden, width),
        "model.layers.2.mlp.shared_experts.up_proj.weight": (width, hidden),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert len(shapes) == 2 + 1 + 3 * (2 + 7) + 3 + 2 * (2 + 5 * 3 + 3)


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("shard", [10**9, 20_000], ids=["one", "many"])
def test_there_and_back(config: ModelConfig, shard: int, tmp_path: Path):
    """Every tensor returns bit for bit, config included, from one file or many."""
    folder = folder_of(tmp_path, config, max_shard_bytes=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard < 10**9)
    back = load_model(folder)
    assert same(back, make_model(config)) and back.config == config


def test_prefix_vision_and_prediction_layers_are_passed_over(tmp_path: Path):
    """The K2.5 folder: text under language_model., a nested config, tensors that are not ours."""
    folder = folder_of(tmp_path, MLA)

    def as_k25(tensors: dict[str, Tensor]) -> None:
        text = {f"language_model.{name}": tensors.pop(name) for name in list(tensors)}
        tensors.update(text)
        tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2)
        tensors["mm_projector.pre_norm.weight"] = torch.zeros(2)
        tensors["language_model.model.layers.3.eh_proj.weight"] = torch.zeros(2)

    rewrite(folder, as_k25)
    inner = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": inner})
    )
    assert same(load_model(folder), make_model(MLA))


def test_bfloat16_keeps_the_selection_bias_in_fp32(tmp_path: Path):
    """A bias step of 1e-3 would vanish in bf16; everything else is rounded."""
    folder = folder_of(tmp_path)
    model = load_model(folder, dtype=torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    biases = [name for name in kinds if name.endswith("bias")]
    assert len(biases) == 2 and all(kinds.pop(name) is torch.float32 for name in biases)
    assert set(kinds.values()) == {torch.bfloat16}
    save_model(model, tmp_path / "again")
    assert same(load_model(tmp_path / "again", dtype=torch.bfloat16), model)
    assert json.loads((tmp_path / "again/config.json").read_text())["dtype"] == "bfloat16"


def test_float16_is_refused(tmp_path: Path):
    """With the reason, when loading and when saving."""
    folder = folder_of(tmp_path)
    with pytest.raises(CheckpointError, match="65,504"):
        load_model(folder, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="65,504"):
        save_model(make_model().half(), tmp_path / "half")


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("model.layers.1.mlp.experts.2.up_proj.weight"), "2.up_proj.weight is missing .1 of"),
        (put("model.layers.0.self_attn.q_proj.bias", torch.zeros(48)), "q_proj.bias is unknown"),
        (put("model.layers.7.input_layernorm.weight", torch.zeros(48)), "layers.7.* is unknown"),
        (put("model.norm.weight", torch.ones(47)), r"norm.weight is \[47\], .* \[48\]"),
        (put("model.norm.weight", torch.full((48,), torch.nan)), "norm.weight holds 48 NaN"),
        (put("model.norm.weight", torch.ones(48, dtype=torch.int32)), "norm.weight is stored as I"),
    ],
)
def test_bad_tensors_are_named(change: Any, words: str, tmp_path: Path):
    """Missing, unknown, of another shape, not a number."""
    folder = folder_of(tmp_path)
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gemma"}, "model_type='gemma' is not supported; expected one of kimi_k2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3'"),
        ({"hidden_size": None}, "hidden_size|is missing|is \\["),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': expected an object"),
        ({"hidden_size": 1e30}, r"model/config.json: hidden_size=1e\+30: expected at most"),
        ({"num_hidden_layers": 3_000_000}, "num_hidden_layers=3000000: expected at most 1024"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers=1000, .* they have 3 layers"),
        ({"n_routed_experts": 10**9}, "n_routed_experts=1000000000: expected at most 65536"),
        ({"n_routed_experts": 60_000}, "n_routed_experts=60000, .* they have 5 experts"),
        ({"vocab_size": 10**7}, r"embed_tokens.weight is \[83, 48\], .*\[10000000, 48\]"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000: expected"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: expected a number"),
        ({"rope_theta": 1.0}, "rope_theta=1.0: expected more than 1"),
        ({"rope_theta": float("nan")}, "rope_theta=nan: expected a finite number"),
        ({"eos_token_id": 83}, "eos_token_id=83 is outside the vocabulary of 83"),
        ({"eos_token_id": [5, -1]}, "eos_token_id=-1 is outside the vocabulary"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: Input should be greater"),
        ({"hidden_size": 10**400}, "hidden_size=1000"),
    ],
)
def test_other_kinds_of_models_are_named(fields: dict[str, Any], words: str, tmp_path: Path):
    """Before any tensor is read."""
    folder = folder_of(tmp_path, MLA)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no .*safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"0" * 99), "is damaged"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"lm_head.weight": "gone.safetensors"}}'
            ),
            "gone.safetensors is missing",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"other.weight": "model.safetensors"}}'
            ),
            "lacks other.weight",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"lm_head.weight": "../model/model.safetensors"}}'
            ),
            "expected the name of a file beside the index",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": ["lm_head.weight"]}'
            ),
            "weight_map is no object",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").mkdir(), "Is a directory"),
        (
            lambda folder: (
                (folder / "model.safetensors").unlink(),
                (folder / "model.safetensors").mkdir(),
            ),
            "model.safetensors is damaged",
        ),
    ],
)
def test_damaged_folders_are_named(damage: Any, words: str, tmp_path: Path):
    """The file and what to do."""
    folder = folder_of(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)


def test_a_folder_is_not_overwritten_and_nan_is_not_saved(tmp_path: Path):
    """Two ways to lose a good model."""
    folder = folder_of(tmp_path)
    with pytest.raises(CheckpointError, match="holds a model already"):
        save_model(make_model(), folder)
    model = make_model()
    with torch.no_grad():
        model.norm.weight[3] = torch.inf
    with pytest.raises(CheckpointError, match=r"model.norm.weight holds NaN or infinity"):
        save_model(model, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path):
    """Files larger than the process may write: one line, and the folders are as before."""
    (tmp_path / "there").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        for target in (tmp_path / "there", tmp_path / "a/new/one"):
            with pytest.raises(CheckpointError, match=f"{target}: .*; nothing was kept"):
                save_model(make_model(), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())


def test_what_belongs_to_the_model_comes_first(tmp_path: Path):
    """A tokenizer that cannot be copied costs no hour of writing, and leaves nothing."""

    def fails(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        raise PermissionError(13, "Permission denied")

    with pytest.raises(CheckpointError, match="Permission denied; nothing was kept"):
        save_model(make_model(), tmp_path / "new", beside=fails)
    assert not (tmp_path / "new").exists()


def test_files_of_others_stay(tmp_path: Path):
    """Into a folder with notes, and after a failure there."""
    (tmp_path / "notes.txt").write_text("mine")
    model = make_model()
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    save_model(make_model(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert same(load_model(tmp_path), make_model())


def test_a_gqa_head_of_no_size(tmp_path: Path):
    """0 is a wrong number, not a missing one."""
    folder = folder_of(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: head_dim=0: Input should be greater"):
        load_model(folder)


def test_convert_streams(tmp_path: Path):
    """Same tensors in another dtype and other shards, without building the model."""
    config, source = open_checkpoint(folder_of(tmp_path, MLA))
    convert(config, source, tmp_path / "out", model_type="deepseek_v3", max_shard_bytes=9000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 5
    assert same(load_model(tmp_path / "out"), make_model(MLA).bfloat16().float()) is False
    expected = load_model(tmp_path / "model", dtype=torch.bfloat16)
    assert same(load_model(tmp_path / "out", dtype=torch.bfloat16), expected)


def test_one_hub_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While it loads, no two tensors of the checkpoint are in memory beside the model."""
    config, source = open_checkpoint(folder_of(tmp_path, MLA))
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(entry: Entry) -> Entry:
        def read() -> Tensor:
            nonlocal most
            tensor = entry.read()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            return tensor

        return replace(entry, read=read)

    entries = {name: watched(entry) for name, entry in source.entries.items()}
    monkeypatch.setattr(source, "entries", entries)
    model = load_tensors(config, source)
    assert same(model, make_model(MLA)) and len(alive) == len(entries)
    assert most <= 2  # the one just read, and the last one that its name still holds


def test_devices(tmp_path: Path):
    """ "auto" on a machine without GPUs is its memory; a map must cover every tensor."""
    folder = folder_of(tmp_path)
    model = load_model(folder, device_map="auto")
    assert same(model, make_model())
    model = load_model(folder, device_map={"": "cpu", "layers.1": "meta"})
    assert model.layers[1].input_layernorm.weight.is_meta and not model.embed_tokens.is_meta
    with pytest.raises(CheckpointError, match="device_map has no device for lm_head"):
        load_model(folder, device_map={"embed_tokens": "cpu"})


def test_hybrid_attention_is_kept(tmp_path: Path):
    """A policy trained to read that way would otherwise come back reading everything."""
    hybrid = {"mode": "hybrid", "hot": 64, "hybrid": {"window": 32, "topk": 4}}
    config = ModelConfig.model_validate(MODEL.model_dump() | {"attention": hybrid})
    folder = folder_of(tmp_path, config)
    assert load_model(folder).config.attention == config.attention
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"parl_attention": "hybrid"}))
    with pytest.raises(CheckpointError, match="parl_attention='hybrid': expected an object"):
        load_model(folder)


def test_a_second_head_of_a_tied_model(tmp_path: Path):
    """The same matrix is a copy; another one would be lost."""
    tied = MODEL.model_copy(update={"tie_word_embeddings": True})
    folder, model = folder_of(tmp_path, tied), make_model(tied)
    rewrite(folder, put("lm_head.weight", model.embed_tokens.detach().clone()))
    assert same(load_model(folder), model)
    rewrite(folder, put("lm_head.weight", torch.zeros_like(model.embed_tokens)))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed"):
        load_model(folder)


def test_types_that_do_not_fit():
    """A latent-attention model is not a Llama."""
    with pytest.raises(CheckpointError, match="cannot be saved as 'llama'"):
        to_hub(MLA, "llama")
    assert to_hub(MODEL)["model_type"] == "parl_k25"
