"""Summaries of blocks in attention: trained maps, cold blocks, the fit, and their files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.sequence import attend_sequence, view_of
from engine.attention.summary import Summaries, block_means, means_of
from engine.attention.summary_adapters import AnchorAdapters, Geometry, MeanAdapters
from engine.attention.summary_files import load_adapters, model_hash, save_adapters
from engine.attention.summary_fit import Captured, fit_anchor, fit_means, targets
from engine.attention.view import LayerView, WarmBlocks
from engine.errors import AttentionError, RouterError
from engine.kvcache.router.encoder import HashingEncoder
from tests.engine.attention.cases import random_case, small_config

HOT = 70
FREQUENCIES = tuple(float(x) for x in 10000.0 ** -(torch.arange(0, 32, 2) / 32))
GEOMETRY = Geometry(2, 2, 4, 32, 24, False, FREQUENCIES)


def some_adapters() -> MeanAdapters:
    """Maps and gates that change something."""
    adapters = MeanAdapters(GEOMETRY)
    generator = torch.Generator().manual_seed(3)
    for parameter in (adapters.to_key, adapters.to_value, adapters.key_bias, adapters.gate):
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapters.requires_grad_(False)


def trained(**changes: object) -> HybridConfig:
    return small_config(summary_weight=0.7, summary_adapters="given.safetensors", **changes)


def test_turning_back_undoes_a_turn_and_keeps_scores_of_equal_distance():
    turn, blocks = some_adapters().turn, torch.tensor([1, 4, 90])
    keys = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn.back(turn(keys, blocks), blocks), keys)
    near = (turn(keys, blocks) * turn(keys.flip(0), blocks)).sum(-1)
    far = (turn(keys, blocks + 7) * turn(keys.flip(0), blocks + 7)).sum(-1)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_untrained_adapters_are_means():
    case = random_case(261)
    summarise = partial(MeanAdapters(GEOMETRY).summarise, 1)
    plain = small_config(summary_weight=0.7, summaries="mean")
    want = attend_sequence(case.q, case.k, case.v, plain, HOT)
    got = attend_sequence(case.q, case.k, case.v, trained(), HOT, summarise=summarise)
    torch.testing.assert_close(got.out, want.out, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("index", ["codes", "none"])
@pytest.mark.parametrize("cold", [0, 2])
def test_decode_and_sequence_summarise_the_same(index: str, cold: int):
    """``cold`` oldest blocks are not in the view; their summaries stand for all their tokens."""
    case, summarise = random_case(261), partial(some_adapters().summarise, 1)
    config = trained(index=index)
    view = view_of(case.k, case.v, HOT)
    assert view.warm is not None and len(view.warm) == 4
    made = summarise(block_means(view.warm, 24))
    kept = view.warm.slots[cold:]
    warm = WarmBlocks(view.warm.keys, view.warm.values, kept + 1, kept)
    seen = LayerView(261, view.sink_k, view.sink_v, view.hot_k, view.hot_v, warm)
    step = attend_hybrid(case.q[-1], seen, config, summaries=made)
    limit = None if not cold else 32 * (4 - cold)
    sequence = partial(attend_sequence, case.q, case.k, case.v, config, HOT, warm=limit)
    whole = sequence(summarise=summarise)
    torch.testing.assert_close(step.out, whole.out[-1], atol=1e-5, rtol=1e-5)
    replayed = sequence(summarise=summarise, replay=whole.selected)
    torch.testing.assert_close(replayed.out, whole.out, atol=1e-6, rtol=1e-5)


def test_a_cold_block_of_one_key_is_read_exactly():
    """Where a cold block's keys and values are one, its mean gives full attention back."""
    case = random_case(198)
    k, v = case.k.clone(), case.v.clone()
    for x in (k, v):
        x[32:128] = x[32:128:32].repeat_interleave(32, dim=0)
    config = small_config(summary_weight=1.0, summaries="mean", candidates=24, topk=24, window=70)
    got = attend_sequence(case.q, k, v, config, HOT, warm=32)
    want = attend_sequence(case.q, k, v, small_config(dense_below=1000), HOT)
    torch.testing.assert_close(got.out[-1], want.out[-1], atol=1e-5, rtol=1e-5)


def test_a_weight_without_summaries_is_refused():
    case = random_case(200)
    with pytest.raises(ValueError, match="untrained summaries make attention worse"):
        HybridConfig(summary_weight=0.5)
    with pytest.raises(AttentionError, match="this call is not given any"):
        attend_sequence(case.q, case.k, case.v, trained(), HOT)
    with pytest.raises(AttentionError, match="this call is not given any"):
        attend_hybrid(case.q[-1], view_of(case.k, case.v, HOT), trained())


# -- fit -------------------------------------------------------------------------------------------


def captured(seed: int) -> Captured:
    case = random_case(400 + seed)
    positions = torch.arange(300, 400, 4)
    q = (case.q[positions] * 32**-0.5).unflatten(1, (2, 2))
    return Captured(q, positions, case.k.transpose(0, 1), case.v.transpose(0, 1), 64)


@torch.no_grad()
def test_ridge_comes_nearer_to_what_blocks_really_get():
    """Mass-weighted error of logits and values, on the documents that were fitted."""
    found = [targets(captured(seed)) for seed in range(4)]
    plain, fitted = MeanAdapters(GEOMETRY), MeanAdapters(GEOMETRY)
    vectors = [HashingEncoder(64).encode([f"{i} {b}" for b in range(20)]) for i in range(4)]
    anchor = AnchorAdapters(GEOMETRY, "hashing-64", 64, 32)
    fit_means(fitted, 0, found)
    fit_anchor(anchor, 0, found, vectors)

    def error(made: list[Summaries]) -> tuple[float, float]:
        logits = values = 0.0
        for one, summaries in zip(found, made, strict=True):
            assert summaries.gate is not None
            scores = torch.einsum("ngpd,gjd->gpnj", one.q, summaries.keys)
            off = one.logits - scores - summaries.gate[:, :, None, None]
            logits += float((one.mass * off.square()).sum())
            wrong = (one.values - summaries.values).square().sum(-1)
            values += float((one.weight * wrong).sum())
        return logits, values

    before = error([plain.summarise(0, one.means) for one in found])
    after = error([fitted.summarise(0, one.means) for one in found])
    assert after[0] < 0.7 * before[0] and after[1] < before[1], (before, after)
    blocks = [one.means.blocks for one in found]
    anchored = error([anchor.summarise(0, vectors[i][b], b) for i, b in enumerate(blocks)])
    assert all(torch.isfinite(torch.tensor(anchored)))


# -- files -----------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    path, adapters = tmp_path / "a" / "means.safetensors", some_adapters()
    save_adapters(adapters, path, "abc")
    found = load_adapters(path, GEOMETRY, trained_with="abc")
    means = means_of(torch.randn(2, 96, 32), torch.randn(2, 96, 24), torch.arange(1, 4))
    one, other = adapters.summarise(1, means), found.summarise(1, means)  # pyright: ignore
    assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    encoder = HashingEncoder(64)
    save_adapters(AnchorAdapters(GEOMETRY, encoder.name, 64, 16), path, "abc")
    anchored = load_adapters(path, GEOMETRY, encoder=encoder)
    assert isinstance(anchored, AnchorAdapters) and anchored.dimension == 64


def test_a_file_that_does_not_fit_is_one_clear_line(tmp_path: Path):
    path = tmp_path / "means.safetensors"
    with pytest.raises(AttentionError, match="no such file"):
        load_adapters(path, GEOMETRY)
    path.write_bytes(b"not a tensor in sight")
    with pytest.raises(AttentionError, match="not a whole safetensors file"):
        load_adapters(path, GEOMETRY)
    save_adapters(some_adapters(), path, "abc")
    with pytest.raises(AttentionError, match="a model with num_layers=2, this one has 3"):
        load_adapters(path, replace(GEOMETRY, num_layers=3))
    with pytest.raises(AttentionError, match="frequencies=16 others"):
        load_adapters(path, replace(GEOMETRY, frequencies=(1.0,) * 16))
    with pytest.raises(AttentionError, match="trained with attention weights abc, this model"):
        load_adapters(path, GEOMETRY, trained_with="def")
    with pytest.raises(AttentionError, match="'block-means', but 'hashing-64'"):
        load_adapters(path, GEOMETRY, encoder=HashingEncoder(64))
    tensors = load_file(path)
    save_file(tensors, path)
    with pytest.raises(AttentionError, match="has format None"):
        load_adapters(path, GEOMETRY)
    tensors["gate"][0] = torch.nan
    adapters = MeanAdapters(GEOMETRY)
    adapters.load_state_dict(tensors)
    save_adapters(adapters, path, "abc")
    with pytest.raises(AttentionError, match="gate holds NaN"):
        load_adapters(path, GEOMETRY)


def test_an_encoder_of_another_dimension_is_refused(tmp_path: Path):
    """The dimension is read from the encoder and checked before anything is summarised."""

    class Wider(HashingEncoder):
        @property
        def name(self) -> str:
            return "hashing-64"

    path = tmp_path / "anchor.safetensors"
    save_adapters(AnchorAdapters(GEOMETRY, "hashing-64", 64, 16), path, "abc")
    with pytest.raises(RouterError, match="summary_dimension is 64 but encoder"):
        load_adapters(path, GEOMETRY, encoder=Wider(96))


def test_the_hash_of_a_model_is_that_of_its_attention():
    tensors = {"layers.0.self_attn.q_proj": torch.ones(2, 2), "embed_tokens": torch.ones(3)}
    first = model_hash(tensors)
    assert model_hash(tensors | {"embed_tokens": torch.zeros(3)}) == first
    assert model_hash({**tensors, "layers.0.self_attn.q_proj": torch.zeros(2, 2)}) != first
