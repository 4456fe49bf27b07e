"""Attention of one query a context: tiers, windows, lists and summaries against fp64."""

import math

import pytest
import torch

from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.topology import warm_end
from engine.attention.view import LayerView, WarmBlocks
from engine.errors import AttentionError, NotSupportedError
from engine.kernels.code_scan import code_scan
from engine.kernels.decode_attn_latent import decode_attn_latent
from engine.kernels.decode_attn_tiered import decode_attn_tiered
from engine.kernels.gathered_attn import gathered_attn, gathered_scores
from engine.kernels.step import decode_hybrid
from engine.kernels.summary_attn import summary_attn
from engine.kernels.tiered import WARM, TieredLayer, layer_of_views
from engine.kvcache.quantise import BLOCK, Profile
from tests.engine.kernels.interpreter import Kernels
from tests.engine.kernels.layers import SMALL, Shape, exact_attention, make_layer
from tests.engine.kernels.parity import assert_as_good, numbers

NAME = "engine.kernels.{0}:{0}"
SCORES = "engine.kernels.gathered_attn:gathered_scores"


def near(length: int, start: int) -> list[int]:
    return [p for p in range(length) if p < BLOCK or p >= start]


def check_decode(
    kernels: Kernels,
    shape: Shape,
    lengths: list[int],
    starts: list[int],
    tiers: list[str],
    profile: Profile = "k8v8",
    scale: float = 0.3,
) -> None:
    layer = make_layer(shape, lengths, tiers, profile)
    q = numbers(len(lengths), shape.heads, shape.key_dim, seed=9)
    arguments = (q, layer, torch.tensor(lengths), torch.tensor(starts), scale)
    ours = kernels.run(NAME.format("decode_attn_tiered"), *arguments)
    torchs = decode_attn_tiered(*arguments)
    seen = [[near(*pair)] * shape.heads for pair in zip(lengths, starts, strict=True)]
    exact = exact_attention(q, layer, seen, scale, shape.value_dim)
    for a, b, c in zip(ours, torchs, exact, strict=True):
        assert_as_good(a, b, c)


def test_sink_window_and_tiers(kernels: Kernels):
    """The window begins inside a warm block; the block before it holds NaN for all we know."""
    check_decode(kernels, SMALL, [101], [40], ["FWWF"])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal"])
def test_ragged_contexts(kernels: Kernels, profile: Profile):
    """Lengths from nothing to several splits, windows of nothing, an absent block in a window."""
    lengths, starts = [0, 1, 32, 33, 64, 300], [0, 0, 32, 40, 64, 100]
    tiers = ["----------", "F", "F", "FF", "FW", "FWWWW-WWFF"]
    check_decode(kernels, SMALL, lengths, starts, tiers, profile)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_flat_and_peaked_attention(kernels: Kernels, scale: float):
    check_decode(kernels, SMALL, [70], [0], ["FWF"], scale=scale)


@pytest.mark.slow
def test_one_head_each_and_sizes_of_real_models(kernels: Kernels):
    check_decode(kernels, Shape(2, 2, 64, 64), [64], [0], ["FW"])
    check_decode(kernels, Shape(20, 1, 128, 96), [64], [0], ["FW"])
    check_decode(kernels, SMALL, [], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("heads", [5, 20])
def test_latent_attention(kernels: Kernels, heads: int):
    """The value is the key's first channels, and the padding of 24 to 32 is no part of it."""
    shape, rank = Shape(heads, 1, 36, 24, latent=True), 24
    lengths, starts = [0, 101, 300], [0, 40, 64]
    layer = make_layer(shape, lengths, ["----------", "FWWF", "FWWWW-WWFF"])
    q = numbers(3, heads, 36, seed=9)
    arguments = (q, layer, rank, torch.tensor(lengths), torch.tensor(starts), 0.2)
    ours = kernels.run(NAME.format("decode_attn_latent"), *arguments)
    torchs = decode_attn_latent(*arguments)
    seen = [[near(*pair)] * heads for pair in zip(lengths, starts, strict=True)]
    exact = exact_attention(q, layer, seen, 0.2, rank)
    for a, b, c in zip(ours, torchs, exact, strict=True):
        assert_as_good(a, b, c)


@pytest.mark.slow
@pytest.mark.parametrize("lists", [2, 4])
@pytest.mark.parametrize("profile", ["k8v8", "k8v4"])
def test_chosen_tokens(kernels: Kernels, lists: int, profile: Profile):
    """Lists of a group or of a head: all tiers, blanks anywhere, nothing at all, a token twice."""
    lengths = [130, 70]
    layer = make_layer(SMALL, lengths, ["FW-WF", "FWF"], profile)
    q = numbers(2, 4, 20, seed=9)
    positions = torch.randint(0, 128, (2, lists, 40), generator=torch.Generator().manual_seed(1))
    positions[1] %= 70
    positions[0, 0, ::3] = -1
    positions[1, lists - 1] = -1
    positions[1, 0, :2] = 33
    ours = kernels.run(NAME.format("gathered_attn"), q, layer, positions, 0.3)
    torchs = gathered_attn(q, layer, positions, 0.3)
    share = 4 // lists
    seen = [
        [[p for p in row[a // share] if p >= 0] for a in range(4)] for row in positions.tolist()
    ]
    exact = exact_attention(q, layer, seen, 0.3, 12)
    for a, b, c in zip(ours, torchs, exact, strict=True):
        assert_as_good(a, b, c)
    scores = kernels.run(SCORES, q, layer, positions, 0.3)
    by_torch = gathered_scores(q, layer, positions, 0.3)
    assert torch.equal(scores == -torch.inf, by_torch == -torch.inf)
    assert_as_good(scores.logsumexp(2), by_torch.logsumexp(2), exact[1])


@pytest.mark.slow
@pytest.mark.parametrize("lists", [1, 20])
def test_chosen_tokens_of_a_latent_layer(kernels: Kernels, lists: int):
    """More heads than a program serves; values are the first 24 of 36 channels."""
    shape, rank = Shape(20, 1, 36, 24, latent=True), 24
    layer = make_layer(shape, [130, 70], ["FW-WF", "FWF"])
    q = numbers(2, 20, 36, seed=9)
    positions = torch.randint(0, 128, (2, lists, 40), generator=torch.Generator().manual_seed(1))
    positions[1] %= 70
    positions[0, 0, ::3] = -1
    arguments = (q, layer, positions, 0.2)
    ours = kernels.run(NAME.format("gathered_attn"), *arguments, value_dim=rank)
    assert set(kernels.launches) == {"gathered_attn_latent"}
    torchs = gathered_attn(*arguments, value_dim=rank)
    share = 20 // lists
    seen = [
        [[p for p in row[a // share] if p >= 0] for a in range(20)] for row in positions.tolist()
    ]
    exact = exact_attention(q, layer, seen, 0.2, rank)
    for a, b, c in zip(ours, torchs, exact, strict=True):
        assert_as_good(a, b, c)
    scores = kernels.run(SCORES, *arguments)
    assert_as_good(scores.logsumexp(2), gathered_scores(*arguments).logsumexp(2), exact[1])


@pytest.mark.slow
def test_a_latent_step_is_that_of_the_cpu_path(kernels: Kernels):
    """More channels than a program scores at once, more heads than it serves."""
    config = HybridConfig(window=40, topk=6, candidates=16, dense_below=0, native="off")
    shape, rank, lengths = Shape(20, 1, 132, 116, latent=True), 116, [150, 230]
    layer = make_layer(shape, lengths, ["FWFFF", "FW-WWFFF"])
    q = numbers(2, 20, 132, seed=9)
    arguments = (q, layer, torch.tensor(lengths), 70, config, 0.1)
    step = kernels.run("engine.kernels.step:decode_hybrid", *arguments, value_dim=rank)
    wanted = {"code_scan", "topk_select", "gathered_scores", "gathered_attn_latent"}
    assert set(kernels.launches) == wanted | {"decode_attn_latent", "lse_merge"}
    for n, length in enumerate(lengths):
        view = view_of(layer, n, length, 70, rank)
        expected = attend_hybrid(q[n], view, config, scale=0.1)
        assert torch.allclose(step.out[n], expected.out, rtol=0, atol=4e-6)
        assert expected.selected is not None
        assert torch.equal(step.selected[n], expected.selected.flatten(0, 1).long())


@pytest.mark.slow
def test_a_row_does_not_know_its_neighbours(kernels: Kernels):
    """The same bits alone and beside a context that needs several splits."""
    layer = make_layer(SMALL, [70, 300], ["FWF", "FWWWWWWWFF"])
    q, lengths, starts = numbers(2, 4, 20), torch.tensor([70, 300]), torch.tensor([0, 0])
    both = kernels.run(NAME.format("decode_attn_tiered"), q, layer, lengths, starts, 0.3)
    alone = TieredLayer(
        layer.full_k, layer.full_v, layer.keys, layer.values, layer.table[:1, :3].contiguous(),
        layer.tiers[:1, :3].contiguous(),
    )  # fmt: skip
    one = kernels.run(NAME.format("decode_attn_tiered"), q[:1], alone, lengths[:1], starts[:1], 0.3)
    assert torch.equal(both[0][:1], one[0]) and torch.equal(both[1][:1], one[1])


@pytest.mark.slow
def test_no_chosen_tokens(kernels: Kernels):
    layer = make_layer(SMALL, [64], ["FW"])
    q, none = numbers(1, 4, 20), torch.zeros(1, 2, 0, dtype=torch.int64)
    out, lse = kernels.run(NAME.format("gathered_attn"), q, layer, none, 0.3)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert kernels.run(SCORES, q, layer, none, 0.3).shape == (1, 4, 0)
    with pytest.raises(AttentionError, match="3 lists"):
        gathered_attn(q, layer, torch.zeros(1, 3, 5, dtype=torch.int64), 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("profile", ["k8v8", "literal"])
def test_the_scan_scores_far_tokens(kernels: Kernels, share: bool, profile: Profile):
    """The bits of engine.attention.codes; sink, window, hot and absent blocks stay hidden."""
    layer = make_layer(SMALL, [200, 40, 190], ["FWW-WFF", "FF", "FWWWWF"], profile)
    q, starts = numbers(3, 4, 20, seed=9), torch.tensor([180, 8, 65])
    q[2, 1] = 0
    q[2, 2] *= 1e-32
    ours = kernels.run(NAME.format("code_scan"), q, layer, starts, 0.3, share)
    assert torch.equal(ours, code_scan(q, layer, starts, 0.3, share))
    shown = (ours > -torch.inf).any(1)
    assert shown[0].nonzero().flatten().tolist() == [*range(32, 96), *range(128, 160)]
    assert not shown[1].any() and shown[2].sum() == 33


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_decode_step_is_that_of_the_cpu_path(kernels: Kernels, shared: bool):
    """Every decode kernel runs; the choice is attend_hybrid's and so is the result. One context
    is dense, one has all its hot tokens in the window, one lacks a cold block."""
    config = HybridConfig(
        window=40, topk=6, candidates=16, topk_shared=shared, dense_below=64, native="off"
    )
    lengths, hot = [60, 150, 230], 70
    layer = make_layer(SMALL, lengths, ["FF", "FWFFF", "FW-WWFFF"])
    q = numbers(3, 4, 20, seed=9)
    step = kernels.run(
        "engine.kernels.step:decode_hybrid", q, layer, torch.tensor(lengths), hot, config, 0.3
    )
    wanted = {"code_scan", "topk_select", "gathered_scores", "gathered_attn"}
    assert set(kernels.launches) == wanted | {"decode_attn_tiered", "lse_merge"}
    for n in range(3):
        view = view_of(layer, n, lengths[n], hot)
        expected = attend_hybrid(q[n], view, config, scale=0.3)
        assert torch.allclose(step.out[n], expected.out, rtol=0, atol=2e-6)
        assert torch.allclose(step.lse[n], expected.lse, rtol=0, atol=2e-6)
        if expected.selected is not None:
            assert torch.equal(step.selected[n], expected.selected.flatten(0, 1).long())


@pytest.mark.slow
def test_views_of_the_cpu_path_become_layers(kernels: Kernels):
    """And means stand for what was not retrieved, as on the CPU path."""
    config = HybridConfig(
        window=40,
        topk=6,
        candidates=16,
        dense_below=0,
        native="off",
        summary_weight=0.5,
        summaries="mean",
    )
    source = make_layer(SMALL, [230], ["FWWWWFFF"])
    view = view_of(source, 0, 230, 70)
    layer = layer_of_views([view])
    means = [torch.zeros(1, 2, 8, size) for size in (20, 12)]
    blocks = torch.arange(1, 5)
    means[0][0, :, 1:5] = source.key_blocks(0, blocks).mean(2).transpose(0, 1)
    means[1][0, :, 1:5] = source.value_blocks(0, blocks, 12).mean(2).transpose(0, 1)
    q = numbers(1, 4, 20, seed=9)
    arguments = (q, layer, torch.tensor([230]), 70, config, 0.3, tuple(means))
    step = kernels.run("engine.kernels.step:decode_hybrid", *arguments)
    expected = attend_hybrid(q[0], view, config, scale=0.3)
    assert torch.allclose(step.out[0], expected.out, rtol=0, atol=2e-6)
    assert torch.allclose(step.lse[0], expected.lse, rtol=0, atol=2e-6)
    with pytest.raises(NotSupportedError, match="quest"):
        decode_hybrid(*arguments[:4], config.model_copy(update={"index": "quest"}), 0.3)


def view_of(
    layer: TieredLayer, context: int, length: int, hot: int, value_dim: int = 12
) -> LayerView:
    """The same context as the CPU path reads it."""
    begin = min(warm_end(length, hot), length)
    blocks = torch.arange(-(-length // BLOCK))
    k = layer.key_blocks(context, blocks).transpose(0, 1).flatten(1, 2)[:, :length]
    v = layer.value_blocks(context, blocks, value_dim).transpose(0, 1).flatten(1, 2)[:, :length]
    warm = blocks[layer.tiers[context, blocks] == WARM]
    pool = WarmBlocks(layer.keys, layer.values, warm, layer.table[context, warm].long())
    return LayerView(
        length, k[:, :BLOCK], v[:, :BLOCK], k[:, begin:], v[:, begin:], pool if len(warm) else None
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [0, 1, 45])
def test_summaries(kernels: Kernels, blocks: int):
    """Counts of 0 hide a summary of one head, of all heads, and the NaN in it."""
    q, keys = numbers(2, 4, 20), numbers(2, 2, blocks, 20, seed=1)
    values = numbers(2, 2, blocks, 12, seed=2)
    counts = torch.randint(0, 33, (2, 4, blocks), generator=torch.Generator().manual_seed(3))
    counts[1, 0] = 0
    if blocks > 1:
        counts[0, :2, 5] = 0
        keys[0, 0, 5] = values[0, 0, 5] = torch.nan
    arguments = (q, keys, values, counts, 0.3, 0.7)
    ours = kernels.run(NAME.format("summary_attn"), *arguments)
    torchs = summary_attn(*arguments)
    grown_k, grown_v = (x.nan_to_num(0).double().repeat_interleave(2, 1) for x in (keys, values))
    logits = 0.3 * (grown_k @ q.double()[..., None])[..., 0]
    logits = logits + counts.double().log() + math.log(0.7)
    exact_lse = logits.logsumexp(2)
    weights = (logits - exact_lse[..., None]).exp().nan_to_num(0)
    exact = (weights[:, :, None] @ grown_v)[:, :, 0]
    assert_as_good(ours[0], torchs[0], exact)
    assert_as_good(ours[1], torchs[1], exact_lse)
    out, lse = kernels.run(NAME.format("summary_attn"), *arguments[:-1], 0.0)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert (summary_attn(*arguments[:-1], 0.0)[1] == -torch.inf).all()
