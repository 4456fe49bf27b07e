"""Merging parts and choosing the highest scores."""

import pytest
import torch

from engine.kernels.lse_merge import lse_merge
from engine.kernels.topk_select import topk_select
from tests.engine.kernels.interpreter import Kernels
from tests.engine.kernels.parity import assert_as_good, numbers

MERGE = "engine.kernels.lse_merge:lse_merge"
TOPK = "engine.kernels.topk_select:topk_select"
SIZES = [(1, 1), (3, 8), (100, 64)]


@pytest.mark.parametrize(
    ("parts", "rows", "size"),
    [
        (3, 4, 20),
        (2, 0, 8),
        pytest.param(1, 2, 1, marks=pytest.mark.slow),
        pytest.param(7, 5, 128, marks=pytest.mark.slow),
    ],
)
def test_parts_merge(kernels: Kernels, parts: int, rows: int, size: int):
    """Parts that saw nothing, alone or all of them, and log-sums far apart."""
    outs, lses = numbers(parts, rows, size), numbers(parts, rows, seed=1, scale=30.0)
    if rows > 1:
        lses[0, 0] = -torch.inf
        lses[:, 1] = -torch.inf
        outs[:, 1] = 0
    ours = kernels.run(MERGE, outs, lses)
    torchs = lse_merge(outs, lses)
    exact_lse = lses.double().logsumexp(0)
    shares = (lses.double() - exact_lse).exp().nan_to_num(0)
    exact = (shares[..., None] * outs.double()).sum(0)
    assert_as_good(ours[0], torchs[0], exact)
    assert_as_good(ours[1], torchs[1], exact_lse)


@pytest.mark.parametrize(
    ("width", "k"),
    [(50, 5), *(pytest.param(*case, marks=pytest.mark.slow) for case in SIZES)],
)
def test_the_highest_scores_are_chosen(kernels: Kernels, width: int, k: int):
    """Equal scores keep the order of positions; hidden ones and NaN are never chosen."""
    scores = (numbers(3, width) * 2).round() / 2
    scores[1, ::3] = -torch.inf
    scores[2] = -torch.inf
    if width > 10:
        scores[0, 4], scores[0, 7], scores[0, 9] = torch.nan, torch.inf, -0.0
    ours = kernels.run(TOPK, scores, k)
    assert torch.equal(ours, topk_select(scores, k))
    assert (ours[2] == -1).all()


@pytest.mark.slow
def test_more_tiles_than_one_round_can_merge(kernels: Kernels):
    """Three rounds give what one sort gives; when every score is equal the first positions win."""
    scores = (numbers(1, 300) * 2).round() / 2
    for row in (scores, torch.zeros(1, 300)):
        ours = kernels.run(TOPK, row, 12, tiles={"topk_select": {"TILE": 64}})
        assert torch.equal(ours, topk_select(row, 12))
        assert kernels.launches["topk_select"] == 3
    assert torch.equal(ours[0], torch.arange(12))


def test_no_scores_choose_nothing(kernels: Kernels):
    for shape in [(2, 0), (0, 5)]:
        empty = torch.zeros(*shape)
        expected = topk_select(empty, 3)
        assert torch.equal(kernels.run(TOPK, empty, 3), expected)
        assert (expected == -1).all()
