"""Which positions are seen and which are warm, as functions of position alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.config import HybridConfig
from engine.attention.topology import (
    chunks,
    far_mask,
    near_mask,
    warm_end,
    warm_mask,
    warm_start,
)
from engine.kvcache import tiers
from engine.kvcache.config import TierConfig
from infra.errors import ConfigError


@pytest.mark.parametrize("hot", [1, 31, 32, 33, 64, 100])
def test_every_form_of_the_warm_rule_agrees(hot: int):
    lengths = torch.arange(1, 300)
    mask = warm_mask(lengths, 300, hot)
    for row, t in enumerate(lengths.tolist()):
        blocks = [b for b in range(10) if tiers.is_warm(b, t, hot)]
        expected = [32 <= p < warm_end(t, hot) for p in range(300)]
        assert mask[row].tolist() == expected
        assert [p // 32 in blocks for p in range(300)] == expected


@pytest.mark.parametrize(("hot", "warm"), [(64, 96), (70, 64), (100, 65536)])
def test_the_cache_and_attention_agree_on_warm_and_cold(hot: int, warm: int):
    config = TierConfig(hot=hot, warm=warm)
    for t in range(1, 500):
        end = warm_end(t, hot)
        assert end == 32 * tiers.warm_end(t, config)
        assert warm_start(end, warm) == 32 * tiers.cold_end(t, config)


def test_warm_tokens_stay_warm_and_are_never_in_the_window():
    hot, window = 70, 64
    lengths = torch.arange(1, 400)
    warm = warm_mask(lengths, 400, hot)
    assert (warm[1:] >= warm[:-1]).all()
    assert not (warm & near_mask(lengths, 400, window)).any()


def test_near_and_far_part_what_is_visible():
    lengths = torch.tensor([1, 5, 32, 33, 64, 65, 200])
    near, far = near_mask(lengths, 200, 32), far_mask(lengths, 200, 32)
    assert not (near & far).any()
    assert torch.equal(near | far, torch.arange(200) < lengths[:, None])
    assert near.sum(dim=1).tolist() == [1, 5, 32, 33, 64, 64, 64]


@settings(max_examples=50, deadline=None)
@given(
    start=st.integers(0, 300),
    count=st.integers(1, 200),
    hot=st.integers(1, 120),
    dense=st.integers(0, 400),
)
def test_chunks_cover_the_queries_and_share_what_they_see(
    start: int, count: int, hot: int, dense: int
):
    found = []
    for chunk in chunks(start, start + count, hot, dense):
        inside = range(chunk.first, chunk.last + 1)
        assert 1 <= len(inside) <= 32
        assert {warm_end(t, hot) for t in inside} == {chunk.warm_end}
        assert {t <= dense for t in inside} == {chunk.dense}
        found += inside
    assert found == list(range(start + 1, start + count + 1))


def test_a_window_beyond_the_hot_zone_is_refused():
    with pytest.raises(ConfigError, match="window 64 is longer than the cache's hot zone 32"):
        HybridConfig(window=64).check_hot(32)


@pytest.mark.parametrize("bad", [{"topk": 300}, {"window": 0}, {"wndow": 3}, {"index": "lsh"}])
def test_bad_configurations_are_refused(bad: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(bad))):
        HybridConfig.model_validate(bad)
