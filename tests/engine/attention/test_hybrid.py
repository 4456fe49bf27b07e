"""Decode and sequence forms of hybrid attention against its definition and each other."""

import pytest
import torch

from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.sequence import attend_sequence, view_of
from engine.attention.summary import block_means
from engine.attention.topology import causal_mask, far_mask, near_mask, warm_mask
from engine.attention.view import LayerView
from engine.errors import AttentionError
from engine.kvcache.quantise import fake_quantise
from infra.errors import ConfigError
from tests.engine.attention.cases import Case, dense_attention, random_case, small_config

HOT = 70
LENGTHS = [1, 31, 32, 33, 99, 100, 101, 102, 133, 134, 135, 200, 261]


def as_read(case: Case, t: int, hot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [t, G, ...] as the query of context length t reads them."""
    k, v = case.k[:t].clone(), case.v[:t].clone()
    for p in warm_mask(torch.tensor([t]), t, hot)[0].nonzero()[::32, 0].tolist():
        block = slice(p, p + 32)
        pair = fake_quantise(k[block].transpose(0, 1)[None], v[block].transpose(0, 1)[None], "k8v8")
        k[block], v[block] = pair[0][0].transpose(0, 1), pair[1][0].transpose(0, 1)
    return k, v


def expected(case: Case, t: int, config: HybridConfig, selected: torch.Tensor | None):
    """The definition, with the choice given."""
    q, (k, v) = case.q[t - 1] * case.q.shape[-1] ** -0.5, as_read(case, t, HOT)
    heads, groups = len(q), k.shape[1]
    length = torch.tensor([t])
    if selected is None:
        seen = causal_mask(length, t).expand(heads, t)
    else:
        seen = near_mask(length, t, config.window).expand(heads, t).clone()
        for head, row in enumerate(selected.expand(groups, heads // groups, -1).flatten(0, 1)):
            seen[head, row[row >= 0].long()] = True
    return dense_attention(q, k, v, seen)


@pytest.mark.parametrize("index", ["codes", "int8", "bf16", "quest", "mean", "none"])
@pytest.mark.parametrize("unit", ["token", "block"])
@pytest.mark.parametrize("shared", [False, True])
def test_decode_and_sequence_agree_and_are_the_definition(index: str, unit: str, shared: bool):
    case = random_case(LENGTHS[-1])
    topk = 8 if unit == "token" else 2
    config = small_config(index=index, topk_unit=unit, topk=topk, topk_shared=shared)
    whole = attend_sequence(case.q, case.k, case.v, config, HOT)
    for t in LENGTHS:
        step = attend_hybrid(case.q[t - 1], view_of(case.k[:t], case.v[:t], HOT), config)
        torch.testing.assert_close(step.out, whole.out[t - 1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(step.lse, whole.lse[t - 1], atol=1e-5, rtol=1e-5)
        assert (step.selected is None) == (t <= config.dense_below)
        recorded = whole.selected[t - 1]
        if step.selected is None:
            assert (recorded == -1).all()
        else:
            assert torch.equal(step.selected, recorded)
            far = far_mask(torch.tensor([t]), t, config.window)[0]
            assert far[recorded[recorded >= 0].long()].all()
        want = expected(case, t, config, step.selected)
        torch.testing.assert_close(step.out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal", "full"])
def test_every_profile_reads_the_same_in_both_forms(profile):
    case, config = random_case(200, value=32), small_config()
    whole = attend_sequence(case.q, case.k, case.v, config, HOT, profile)
    step = attend_hybrid(case.q[-1], view_of(case.k, case.v, HOT, profile), config)
    torch.testing.assert_close(step.out, whole.out[-1], atol=1e-5, rtol=1e-5)
    assert step.selected is not None and torch.equal(step.selected, whole.selected[-1])


def test_retrieving_everything_is_full_attention_over_what_is_cached():
    case = random_case(230)
    config = small_config(topk=512, candidates=512)
    everything = small_config(dense_below=1000)
    view = view_of(case.k, case.v, HOT)
    step, dense = (attend_hybrid(case.q[-1], view, c) for c in (config, everything))
    torch.testing.assert_close(step.out, dense.out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(step.lse, dense.lse, atol=1e-6, rtol=1e-5)


def test_chunks_of_a_prefill_do_not_change_it():
    """Selections are the same; sums may differ by rounding."""
    case, config = random_case(200), small_config()
    whole = attend_sequence(case.q, case.k, case.v, config, HOT)
    for begin, end in ((0, 7), (7, 120), (120, 200)):
        part = attend_sequence(case.q[begin:end], case.k[:end], case.v[:end], config, HOT)
        torch.testing.assert_close(part.out, whole.out[begin:end], atol=1e-5, rtol=1e-5)
        assert torch.equal(part.selected, whole.selected[begin:end])


def test_a_recorded_choice_is_replayed():
    case, config = random_case(200), small_config()
    first = attend_sequence(case.q, case.k, case.v, config, HOT)
    again = attend_sequence(case.q, case.k, case.v, config, HOT, replay=first.selected)
    assert torch.equal(again.out, first.out)
    other = first.selected.clone()
    other[150, 0, 0] = -1
    changed = attend_sequence(case.q, case.k, case.v, config, HOT, replay=other).out != first.out
    assert changed[150, 0].any() and changed.flatten(1).any(dim=1).sum() == 1
    with pytest.raises(AttentionError, match="recorded selections have shape"):
        attend_sequence(case.q, case.k, case.v, config, HOT, replay=other[1:])
    other[150] = 199
    with pytest.raises(AttentionError, match="recorded selections name position 199"):
        attend_sequence(case.q, case.k, case.v, config, HOT, replay=other)


def test_gradients_are_those_of_attention_over_what_was_read():
    """Straight through the codes; none through the choice. Checked at one query against autograd
    over keys and values that are leaves at their coded values."""
    case, config = random_case(160), small_config()
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    result = attend_sequence(q, k, v, config, HOT)
    result.out[-1].square().sum().backward()
    read_k, read_v = (x.requires_grad_() for x in as_read(case, 160, HOT))
    last = case.q[-1].clone().requires_grad_()
    seen = near_mask(torch.tensor([160]), 160, config.window).expand(4, 160).clone()
    for head, row in enumerate(result.selected[-1].flatten(0, 1)):
        seen[head, row.long()] = True
    dense_attention(last * 32**-0.5, read_k, read_v, seen).square().sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    for got, want in ((q.grad[-1], last.grad), (k.grad, read_k.grad), (v.grad, read_v.grad)):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert not k.grad[~seen.any(dim=0)].any()


def test_latent_attention_reads_values_from_its_keys():
    """One key-value head whose value is the key's first channels; a choice shared by softmax."""
    case = random_case(180, heads=4, groups=1, dim=48)
    config = small_config(topk_shared=True, share="softmax", topk=16)
    whole = attend_sequence(case.q, case.k, None, config, HOT, value_dim=32)
    step = attend_hybrid(case.q[-1], view_of(case.k, None, HOT, value_dim=32), config)
    torch.testing.assert_close(step.out, whole.out[-1], atol=1e-5, rtol=1e-5)
    assert step.selected is not None and torch.equal(step.selected, whole.selected[-1])


def test_summaries_of_weight_zero_are_absent_to_the_last_bit():
    case = random_case(200)
    view = view_of(case.k, case.v, HOT)
    means = block_means(view.warm, 24) if view.warm else None
    without = attend_hybrid(case.q[-1], view, small_config())
    weightless = attend_hybrid(case.q[-1], view, small_config(summary_weight=0.0), summaries=means)
    assert torch.equal(without.out, weightless.out) and torch.equal(without.lse, weightless.lse)


def test_summaries_stand_for_the_tokens_that_were_not_retrieved():
    """Where all keys and values of a block are one, its mean is exact: the result is full
    attention."""
    case = random_case(198)
    k, v = case.k.clone(), case.v.clone()
    for x in (k, v):
        x[32:128] = x[32:128:32].repeat_interleave(32, dim=0)
    config = small_config(summary_weight=1.0, summaries="mean", candidates=24, topk=24, window=70)
    view, full = view_of(k, v, HOT), small_config(dense_below=1000)
    got, want = attend_hybrid(case.q[-1], view, config), attend_hybrid(case.q[-1], view, full)
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    whole = attend_sequence(case.q, k, v, config, HOT)
    torch.testing.assert_close(whole.out[-1], got.out, atol=1e-5, rtol=1e-5)
    replayed = attend_sequence(case.q, k, v, config, HOT, replay=whole.selected)
    torch.testing.assert_close(replayed.out, whole.out, atol=1e-6, rtol=1e-6)


def test_cold_blocks_are_not_seen():
    case, config = random_case(260), small_config(dense_below=0, topk=512, candidates=512)
    view = view_of(case.k, case.v, HOT)
    assert view.warm is not None and len(view.warm) == 4
    kept = torch.tensor([0, 3])
    warm = type(view.warm)(view.warm.keys, view.warm.values, kept + 1, kept)
    fewer = LayerView(260, view.sink_k, view.sink_v, view.hot_k, view.hot_v, warm)
    step = attend_hybrid(case.q[-1], fewer, config)
    assert step.selected is not None
    places = step.selected[step.selected >= 0]
    assert not ((places >= 64) & (places < 128)).any()
    seen = torch.ones(4, 260, dtype=torch.bool)
    seen[:, 64:128] = False
    want = dense_attention(case.q[-1] * 32**-0.5, *as_read(case, 260, HOT), seen)
    torch.testing.assert_close(step.out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dense_below", [0, 1000])
def test_a_bounded_warm_tier_hides_what_is_older_in_both_forms(dense_below: int):
    case, config = random_case(260), small_config(dense_below=dense_below)
    view = view_of(case.k, case.v, HOT)
    assert view.warm is not None
    last = view.warm.slots[-2:]
    warm = type(view.warm)(view.warm.keys, view.warm.values, last + 1, last)
    fewer = LayerView(260, view.sink_k, view.sink_v, view.hot_k, view.hot_v, warm)
    step = attend_hybrid(case.q[-1], fewer, config)
    whole = attend_sequence(case.q, case.k, case.v, config, HOT, warm=80)
    torch.testing.assert_close(step.out, whole.out[-1], atol=1e-5, rtol=1e-5)
    assert step.selected is None or torch.equal(step.selected, whole.selected[-1])


def test_views_that_are_not_one_context_are_refused():
    case = random_case(200)
    view = view_of(case.k, case.v, HOT)
    with pytest.raises(AttentionError, match="keep at least 90 tokens hot"):
        attend_hybrid(case.q[-1], view, small_config(window=90))
    with pytest.raises(ConfigError, match="longer than the cache's hot zone"):
        attend_sequence(case.q, case.k, case.v, small_config(window=90), HOT)
    with pytest.raises(AttentionError, match="overlap the sink or the hot"):
        LayerView(
            200, view.sink_k, view.sink_v, case.k.transpose(0, 1)[:, 40:], view.hot_v, view.warm
        )
    with pytest.raises(AttentionError, match="is not one"):
        LayerView(20, view.sink_k, view.sink_v, view.hot_k, view.hot_v)


def test_a_planted_needle_is_read_through_the_index_and_lost_without_it():
    """One far key that a query head points at, among 1,500 keys of noise; values of the needle are
    5, of the rest about 0. KL of softmax(out) against full attention tells them apart."""
    case = random_case(1500, heads=4, groups=2, dim=64, value=16)
    k, v, q = case.k.clone(), case.v.clone(), case.q[-1].clone()
    mean = case.k.mean(dim=0)
    needle = 700
    q -= (q.view(2, 2, 64) * mean[:, None]).sum(-1).view(4, 1) / 64 * mean.repeat_interleave(2, 0)
    k[needle] = mean + 3 * q.view(2, 2, 64).mean(dim=1)
    v[needle] = 5.0
    view = view_of(k, v, 128)
    full = attend_hybrid(q, view, small_config(dense_below=10**6)).out
    loss = {}
    for index in ("codes", "int8", "bf16", "none"):
        config = small_config(index=index, window=128, topk=64, candidates=256)
        out = attend_hybrid(q, view, config)
        log_p, log_q = full.log_softmax(-1), out.out.log_softmax(-1)
        loss[index] = float((log_p.exp() * (log_p - log_q)).sum(dim=-1).mean())
        if out.selected is not None and index != "none":
            assert (out.selected == needle).any(dim=-1).all(), index
    assert max(loss["codes"], loss["int8"]) < 2 * loss["bf16"] + 0.02
    assert float((full.mean(dim=-1) > 2).float().mean()) == 1.0, "full attention finds the needle"
    none = attend_hybrid(q, view, small_config(index="none", window=128)).out
    assert none.mean(dim=-1).max() < 1.0, "and the window alone must not"
