"""Merging parts of attention by their log-sum-exp."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.merge import merge, softmax_part


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=5),
    hidden=st.sets(st.integers(0, 39), max_size=39),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**20),
)
def test_any_partition_merges_to_the_whole(
    cuts: list[int], hidden: set[int], scale: float, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, 40, generator=generator)
    logits[:, list(hidden)] = -torch.inf
    values = torch.randn(40, 5, generator=generator)
    whole, lse = softmax_part(logits, values)
    bounds = [0, *sorted(cuts), 40]
    pieces = [slice(a, b) for a, b in pairwise(bounds)]
    out, merged_lse = merge([softmax_part(logits[:, p], values[p]) for p in pieces])
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged_lse, lse, atol=1e-5, rtol=1e-6)


def test_parts_that_see_nothing_change_nothing():
    values = torch.randn(7, 4)
    seen = softmax_part(torch.randn(2, 7), values)
    blind = softmax_part(torch.full((2, 7), -torch.inf), values)
    none = softmax_part(torch.empty(2, 0), torch.empty(0, 4))
    assert blind[1].tolist() == none[1].tolist() == [-torch.inf] * 2
    assert not blind[0].any() and not none[0].any()
    out, lse = merge([none, seen, blind])
    assert torch.equal(out, merge([seen])[0]) and torch.equal(lse, merge([seen])[1])
    out, lse = merge([none, blind])
    assert not out.any() and lse.tolist() == [-torch.inf] * 2


def test_merging_is_associative_and_commutative():
    generator = torch.Generator().manual_seed(0)
    parts = [
        softmax_part(torch.randn(2, n, generator=generator), torch.randn(n, 3, generator=generator))
        for n in (1, 5, 9)
    ]
    at_once = merge(parts)
    nested = merge([parts[2], merge([parts[1], parts[0]])])
    torch.testing.assert_close(nested, at_once, atol=1e-6, rtol=1e-6)


def test_gradients_pass_through_a_merge_with_an_empty_part():
    logits = torch.randn(2, 6, requires_grad=True)
    values = torch.randn(6, 3)
    empty = softmax_part(torch.empty(2, 0), torch.empty(0, 3))
    merged = merge([softmax_part(logits[:, :4], values[:4]), empty,
                    softmax_part(logits[:, 4:], values[4:])])  # fmt: skip
    merged[0].square().sum().backward()
    assert logits.grad is not None
    whole = logits.detach().clone().requires_grad_()
    (whole.softmax(dim=-1) @ values).square().sum().backward()
    torch.testing.assert_close(logits.grad, whole.grad, atol=1e-6, rtol=1e-5)
