"""attend_batch against attend_sequence, sequence by sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.batched import attend_batch
from engine.attention.config import HybridConfig
from engine.attention.recorded import CodeFlips, RecordedCodes
from engine.attention.sequence import attend_sequence
from engine.errors import AttentionError
from engine.kvcache.layout import CacheLayout
from engine.kvcache.pools import WarmPool
from engine.kvcache.quantise import Profile

LENGTHS = torch.tensor([180, 33, 97, 1])


def config(**fields: Any) -> HybridConfig:
    return HybridConfig(**({"window": 24, "topk": 6, "dense_below": 0} | fields))


def rows(heads: int = 4, groups: int = 2, dim: int = 16, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    longest = int(LENGTHS.max())
    found = []
    for count in (heads, groups, groups):
        x = torch.randn(len(LENGTHS), longest, count, dim, generator=generator)
        found.append(x.masked_fill((torch.arange(longest) >= LENGTHS[:, None])[..., None, None], 0))
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"topk_shared": True},
        {"dense_below": 60},
        {"index": "none"},
        {"candidates": 8},
        {"topk_unit": "block", "topk": 2},
        {"summary_weight": 0.5, "summaries": "mean"},
    ],
)
@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "full"])
def test_the_same_as_one_by_one(fields: dict[str, Any], profile: Any):
    """Outputs, choices and gradients; also where it hands over to attend_sequence."""
    given = [x.requires_grad_() for x in rows()]
    knobs = config(**fields)
    both = attend_batch(*given, LENGTHS, knobs, 40, profile, with_choice=True)
    total = torch.zeros(())
    for row, length in enumerate(LENGTHS.tolist()):
        alone = attend_sequence(*(x[row, :length] for x in given), knobs, 40, profile)
        torch.testing.assert_close(both.out[row, :length], alone.out, rtol=1e-5, atol=1e-5)
        assert both.selected is not None
        assert torch.equal(both.selected[row, :length], alone.selected)
        total = total + (alone.out**2).sum()
    expected = torch.autograd.grad(total, given)
    real = torch.arange(both.out.shape[1]) < LENGTHS[:, None]
    found = torch.autograd.grad((both.out[real] ** 2).sum(), given)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("candidates", [256, 8])
def test_a_recorded_choice_is_read_and_the_own_one_told(candidates: int):
    """Read the choice of other queries: other outputs, and what these would have chosen."""
    q, k, v = rows()
    knobs = config(candidates=candidates)
    own = attend_batch(q, k, v, LENGTHS, knobs, 40, with_choice=True)
    other = attend_batch(rows(seed=2)[0], k, v, LENGTHS, knobs, 40, with_choice=True)
    assert own.selected is not None and other.selected is not None
    read = attend_batch(q, k, v, LENGTHS, knobs, 40, replay=other.selected, with_choice=True)
    assert read.selected is not None and torch.equal(read.selected, own.selected)
    assert not torch.allclose(read.out[0], own.out[0], atol=1e-3)
    again = attend_batch(q, k, v, LENGTHS, knobs, 40, replay=own.selected)
    real = torch.arange(q.shape[1]) < LENGTHS[:, None]
    torch.testing.assert_close(again.out[real], own.out[real], rtol=0, atol=1e-6)
    assert again.selected is None


@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal"])
def test_recorded_codes_are_read_and_differences_counted(profile: Profile):
    """Codes of other keys and values, of some of the blocks, read by all sequences at once and one
    by one: the same outputs and gradients, which pass the codes by; every difference is counted."""
    q, k, v = (x.requires_grad_() for x in rows())
    layout = CacheLayout(1, 2, 16, 16, profile)
    pool = WarmPool(layout, 3, "cpu", nan=False)
    _, other_k, other_v = rows(seed=3)
    slots = torch.tensor(pool.take(3))
    pool.write(0, slots, *(_blocks_of(x[0], 3) for x in (other_k, other_v)))
    payload = torch.zeros(4, 3, layout.warm_block_bytes, dtype=torch.uint8)
    payload[0] = torch.from_numpy(pool.read(slots.tolist()))
    recorded = RecordedCodes(payload, torch.tensor([3, 0, 0, 0]), layout).layer(0)
    found, counts = [], []
    for candidates in (256, 8):
        flips = CodeFlips()
        knobs = config(candidates=candidates, dense_below=180)
        out = attend_batch(q, k, v, LENGTHS, knobs, 40, profile, recorded=recorded, flips=flips).out
        real = torch.arange(out.shape[1]) < LENGTHS[:, None]
        found.append([out[real], *torch.autograd.grad((out[real] ** 2).sum(), (q, k, v))])
        counts.append((flips.flips, flips.recorded))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # keys and values have nothing to do with each other, so nearly all codes differ
    assert counts[0] == counts[1] and 0.7 * counts[0][1] < counts[0][0] < counts[0][1]
    assert counts[0][1] == layout_numbers(layout) * 3
    own = attend_batch(q, k, v, LENGTHS, config(dense_below=180), 40, profile).out
    # block 1 turns warm at 104 tokens
    same = (own - out).abs().amax(dim=(2, 3)) < 1e-5
    assert bool(same[0, :103].all()) and not bool(same[0, 103:].any())
    assert bool(same[1:][real[1:]].all())


def layout_numbers(layout: CacheLayout) -> int:
    """Codes, scales and minima of a block of one layer with two heads."""
    keys = 32 * 16 + 2 * (1 if layout.profile == "literal" else 16)
    scales = {"k8v8": 32, "k8v4": 64, "literal": 1}[layout.profile]
    return 2 * (keys + 32 * 16 + scales)


def _blocks_of(x: Tensor, count: int) -> Tensor:
    """[T, G, D] -> blocks 1 .. count [count, G, 32, D]"""
    return x[32 : 32 * (count + 1)].unflatten(0, (count, 32)).transpose(1, 2)


def test_latent_rows_are_their_own_values():
    """Absorbed mla: one head of keys, whose first channels are the values, as they read."""
    q, k, _ = rows(heads=4, groups=1, dim=24)
    both = attend_batch(q, k, None, LENGTHS, config(), 40, value_dim=16)
    alone = attend_sequence(q[0], k[0], None, config(), 40, value_dim=16)
    torch.testing.assert_close(both.out[0], alone.out, rtol=1e-5, atol=1e-5)


def test_recorded_choices_that_cannot_be():
    """Another shape, or a token of the future."""
    q, k, v = rows()
    made = attend_batch(q, k, v, LENGTHS, config(), 40, with_choice=True).selected
    assert made is not None
    with pytest.raises(AttentionError, match="need"):
        attend_batch(q, k, v, LENGTHS, config(), 40, replay=made[..., :3])
    made[0, 50, 0, 0, 0] = 120
    with pytest.raises(AttentionError, match="position 120, which lies after"):
        attend_batch(q, k, v, LENGTHS, config(), 40, replay=made)
