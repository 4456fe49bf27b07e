"""The key-code index: what it scores, which ties it breaks, how much it finds."""

import pytest
import torch

from engine.attention.codes import scan_codes
from engine.attention.config import HybridConfig
from engine.attention.index import KeyCodeIndex, exact_scores
from engine.attention.select import captured_mass, choose, listed, recall, top_positions
from engine.attention.view import WarmBlocks
from engine.errors import AttentionError
from engine.kvcache.quantise import dequantise_keys, key_codes, quantise_keys


def warm_blocks(num_blocks: int, groups: int = 2, dim: int = 32, spread: float = 1.0) -> WarmBlocks:
    generator = torch.Generator().manual_seed(num_blocks)
    k = torch.randn(num_blocks, groups, 32, dim, generator=generator)
    k += spread * torch.randn(groups, 1, dim, generator=generator)
    slots = torch.arange(num_blocks)
    return WarmBlocks(quantise_keys(k), None, slots + 1, slots)


def queries(rows: int = 1, groups: int = 2, heads: int = 2, dim: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, groups, heads, dim, generator=generator)


def test_the_scan_is_the_query_times_the_middle_of_the_top_bits():
    """Up to rounding the query to int8: at most half a step a channel."""
    warm, q = warm_blocks(9), queries(3)
    codes = (key_codes(warm.keys) >> 6).float() * 64 + 31.5
    middle = warm.keys.minimum.float()[:, :, None] + warm.keys.scale.float()[:, :, None] * codes
    exact = exact_scores(q, middle.transpose(0, 1).flatten(1, 2))
    scores = scan_codes(q, warm)
    assert scores.shape == exact.shape == (3, 2, 2, 9 * 32)
    assert (scores - exact).abs().max() < 0.02 * (exact.max() - exact.min())


def test_scores_do_not_depend_on_what_else_is_scanned():
    """Bits are the same for one row or many, and for a block alone or among others."""
    warm, q = warm_blocks(7), queries(5)
    scores = scan_codes(q, warm)
    for row in range(5):
        assert torch.equal(scan_codes(q[row : row + 1].clone(), warm)[0], scores[row])
    alone = WarmBlocks(warm.keys, None, warm.blocks[3:4], warm.slots[3:4])
    assert torch.equal(scan_codes(q, alone), scores[..., 96:128])


def test_a_zero_query_and_constant_keys_score_finitely():
    keys = quantise_keys(torch.zeros(2, 1, 32, 16))
    slots = torch.arange(2)
    scores = scan_codes(torch.zeros(1, 1, 1, 16), WarmBlocks(keys, None, slots + 1, slots))
    assert not scores.any()


@pytest.mark.parametrize("kind", ["codes", "int8", "bf16", "quest", "mean"])
def test_an_index_that_grew_scores_as_one_made_at_once(kind):
    warm, q = warm_blocks(6), queries()
    grown = KeyCodeIndex(kind)
    for count in (2, 3, 6):
        part = WarmBlocks(warm.keys, None, warm.blocks[:count], warm.slots[:count])
        last = grown.scores(q, part)
    assert torch.equal(last, KeyCodeIndex(kind).scores(q, warm))
    moved = WarmBlocks(warm.keys, None, warm.blocks[1:], warm.slots[1:])
    assert torch.equal(grown.scores(q, moved), KeyCodeIndex(kind).scores(q, moved))


def test_quest_bounds_what_any_key_of_the_block_scores():
    warm, q = warm_blocks(6), queries(2)
    exact = KeyCodeIndex("bf16").scores(q, warm).unflatten(-1, (-1, 32)).amax(dim=-1)
    assert (KeyCodeIndex("quest").scores(q, warm) >= exact - 1e-4).all()


@pytest.mark.parametrize(("kind", "least"), [("bf16", 0.9), ("int8", 0.9), ("codes", 0.85)])
def test_candidates_hold_what_an_exact_scan_would_choose(kind, least):
    """recall@16 of 96 candidates, shared by two heads, out of 2,048 keys of noise: the case in
    which two bits say least."""
    warm, q = warm_blocks(64, dim=64), queries(4, dim=64)
    config = HybridConfig(topk=16, candidates=96, index=kind, share="softmax")
    exact = exact_scores(q, warm.dequantised_keys())
    wanted = top_positions(exact, 16)
    found = KeyCodeIndex(kind).candidates(q, warm, config)
    assert found.shape == (4, 2, 96) and (found.diff() > 0).all()
    assert recall(found[:, :, None], wanted) >= least


@pytest.mark.parametrize("kind", ["codes", "quest"])
def test_block_units_pass_on_whole_blocks(kind):
    warm, q = warm_blocks(20), queries()
    config = HybridConfig(topk=5, candidates=64, topk_unit="block", index=kind)
    found = KeyCodeIndex(kind).candidates(q, warm, config)
    assert found.shape == (1, 2, 5 * 32)
    blocks = found.unflatten(-1, (5, 32))
    assert torch.equal(blocks, blocks[..., :1] // 32 * 32 + torch.arange(32))


def test_rows_of_the_view_are_the_dequantised_keys():
    warm = warm_blocks(4)
    tokens = torch.tensor([[[0, 5, 127], [31, 32, 64]]])
    whole = dequantise_keys(warm.keys).transpose(0, 1).flatten(1, 2)
    rows = warm.key_rows(tokens)
    for group in range(2):
        assert torch.equal(rows[0, group], whole[group, tokens[0, group]])


@pytest.mark.parametrize("size", [3, 8, 40, 300, 2048])
@pytest.mark.parametrize("levels", [1, 2, 5, 10**6])
def test_top_positions_prefer_the_lower_place_among_equals(size: int, levels: int):
    generator = torch.Generator().manual_seed(size + levels)
    scores = torch.randint(0, levels, (4, size), generator=generator).float()
    got = top_positions(scores, 7)
    for row, places in zip(scores.tolist(), got.tolist(), strict=True):
        order = sorted(range(size), key=lambda i: (-row[i], i))
        assert places == sorted(order[:7])


@pytest.mark.parametrize(("num_blocks", "levels"), [(40, 0), (41, 0), (40, 3)])
def test_the_copy_finds_the_best_without_scoring_all(num_blocks: int, levels: int):
    """More than 64 tokens a candidate; with few levels equals compete, and the lower place wins."""
    warm, q = warm_blocks(num_blocks), queries(3)
    if levels:
        k = torch.randint(0, levels, (num_blocks, 2, 32, 32)).float()
        warm = WarmBlocks(quantise_keys(k), None, warm.blocks, warm.slots)
        q = torch.ones_like(q)
    index = KeyCodeIndex("int8")
    wanted = index.scores(q, warm).amax(dim=2).sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 7, 20):
        config = HybridConfig(topk=1, candidates=count, index="int8")
        found = index.candidates(q, warm, config)
        assert torch.equal(found, wanted[..., :count].sort(dim=-1).values)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("unit", ["token", "block"])
def test_a_choice_never_holds_what_is_not_there(shared: bool, unit):
    logits = torch.full((1, 1, 2, 64), -torch.inf)
    logits[..., 3] = 1.0
    logits[0, 0, 0, 40] = 2.0
    config = HybridConfig(topk=4, candidates=4, topk_unit=unit, topk_shared=shared)
    chosen = choose(logits, config)
    assert torch.equal(chosen, logits > -torch.inf)
    positions = torch.arange(100, 164)[None, None]
    assert listed(chosen, positions, 4).tolist() == [[[[103, 140, -1, -1], [103, -1, -1, -1]]]]


def test_softmax_shares_favour_what_most_heads_want():
    """Three heads want token 1 a little; one wants token 0 much: largest and summed differ."""
    logits = torch.tensor([[9.0, 8.9, 0.0], [0.0, 5.0, 0.0], [0.0, 5.0, 0.0]])[None, None]
    for place, config in enumerate(
        [
            HybridConfig(topk=1, candidates=3, topk_shared=True, share="max"),
            HybridConfig(topk=1, candidates=3, topk_shared=True, share="softmax"),
        ]
    ):
        assert choose(logits, config)[0, 0, 0].nonzero().tolist() == [[place]]


def test_recall_and_captured_mass():
    assert recall(torch.tensor([1, 2, -1]), torch.tensor([2, 3, -1])) == 0.5
    assert recall(torch.tensor([-1]), torch.tensor([-1])) == 1.0
    logits = torch.tensor([0.0, 0.0, -torch.inf, 0.0])
    assert captured_mass(logits, torch.tensor([1, 0, 1, 1]).bool()).item() == pytest.approx(2 / 3)


def test_index_none_has_no_scores():
    assert KeyCodeIndex("none").candidates(queries(), warm_blocks(2), HybridConfig()).numel() == 0
    with pytest.raises(AttentionError, match="scores nothing"):
        KeyCodeIndex("none").scores(queries(), warm_blocks(2))
