"""Logits against transformers: DeepseekV3 and Llama, fp32, through files, both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.model.checkpoint.load import load_model
from engine.model.checkpoint.save import save_model
from engine.model.dense import DenseCache, forward_dense
from engine.model.model import PolicyModel
from engine.model.ops import FastOps, TiledOps
from tests.engine.model.hub import YARN, deepseek, llama, saved

CONFIGS: dict[str, dict[str, Any]] = {
    "k2.5": {},
    "k2-0905": {"rope_parameters": YARN | {"beta_fast": 1.0}},
    "k2-0711": {"rope_parameters": YARN | {"beta_fast": 1.0, "factor": 32.0}},
    "no-yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mscales-differ": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    "no-all-dim": {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}},
    "whole-queries": {"q_lora_rank": None},
    "v3-groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "no-norm": {"norm_topk_prob": False, "num_experts_per_tok": 3, "n_shared_experts": 2},
    "half-split": {"rope_interleave": False},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
}


def tokens(batch: int = 3, length: int = 29, seed: int = 3) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def ours(model: PolicyModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    real = torch.ones_like(ids) if mask is None else mask
    hidden, _ = forward_dense(model, ids, real.bool(), **options)
    return model.logits(hidden)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_deepseek_v3(name: str, tmp_path: Path):
    """Their save, our load; our save, their load."""
    theirs = deepseek(7, **CONFIGS[name])
    model = load_model(saved(theirs, tmp_path / "theirs"))
    ids = tokens()
    expected = theirs(ids, use_cache=False).logits
    assert 2 < float(expected.abs().max()) < 6, "the tolerance is for logits of about 4"
    torch.testing.assert_close(ours(model, ids), expected, rtol=0, atol=1e-4)
    save_model(model, tmp_path / "ours", model_type="deepseek_v3", max_shard_bytes=40_000)
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    )
    assert type(back) is type(theirs)
    torch.testing.assert_close(back(ids, use_cache=False).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("absorbed", [False, True], ids=["plain", "absorbed"])
@torch.no_grad()
def test_padding_prefill_and_decode(side: str, absorbed: bool, tmp_path: Path):
    """Rows of different lengths, then tokens one by one from the cache, on both sides."""
    theirs = deepseek(11)
    model = load_model(saved(theirs, tmp_path))
    ids, mask = tokens(length=24), torch.ones(3, 24, dtype=torch.long)
    for row, short in ((1, 5), (2, 11)):
        mask[row, :short] = 0
    if side == "right":
        mask = mask.flip(1)
    prompt = 18 if side == "left" else 24
    theirs_cache, cache = None, DenseCache()
    for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, 24))]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        result = theirs(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions,
            past_key_values=theirs_cache,
            use_cache=True,
        )
        theirs_cache = result.past_key_values
        mine = ours(model, ids[:, start:end], mask[:, :end], extend=cache.extend, absorbed=absorbed)
        real = mask[:, start:end].bool()
        torch.testing.assert_close(mine[real], result.logits[real], rtol=0, atol=1e-4)
    whole = ours(model, ids, mask)[:, -1]
    if side == "left":
        torch.testing.assert_close(mine[:, -1], whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(4, 12))
@torch.no_grad()
def test_absorbed_and_incremental_agree(seed: int, tmp_path: Path):
    """Absorbed = plain and one token at a time = all at once, to 1e-5 at logits of about 4.

    With the engine's tiles. Products whose kernel changes with the number of rows differ by their
    rounding alone: up to 1.2e-5 over these seeds, so that they get 2e-5 here.
    """
    model = load_model(saved(deepseek(seed), tmp_path))
    ids = tokens()
    for ops, bar in ((TiledOps(), 1e-5), (FastOps(), 2e-5)):
        whole = ours(model, ids, ops=ops)
        absorbed = ours(model, ids, absorbed=True, ops=ops)
        torch.testing.assert_close(absorbed, whole, rtol=0, atol=1e-5)
        for form in (False, True):
            steps = one_by_one(model, ids, absorbed=form, ops=ops)
            torch.testing.assert_close(steps, whole, rtol=0, atol=bar)


def one_by_one(model: PolicyModel, ids: Tensor, **options: Any) -> Tensor:
    cache = DenseCache()
    steps = [
        ours(model, ids[:, at : at + 1], torch.ones(3, at + 1), extend=cache.extend, **options)
        for at in range(ids.shape[1])
    ]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_llama(tied: bool, tmp_path: Path):
    """Grouped-query attention, dense layers, tied and untied heads; both directions."""
    theirs = llama(3, tie_word_embeddings=tied)
    model = load_model(saved(theirs, tmp_path / "theirs"))
    ids = tokens()
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(model, ids), expected, rtol=0, atol=1e-4)
    save_model(model, tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(back) is type(theirs)
    torch.testing.assert_close(back(ids).logits, expected, rtol=0, atol=1e-5)
