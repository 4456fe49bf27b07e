"""Boundary smoothing: it cannot hurt, and it does not help."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache.quantise import fake_quantise_keys
from engine.kvcache.smoothing import correction, smoothed


@given(seed=st.integers(0, 2**16), size=st.sampled_from([1e-6, 1.0, 300.0]))
@pytest.mark.parametrize("profile", ["k8v8", "literal"])
def test_the_error_never_rises(profile, seed, size):
    draw = torch.Generator().manual_seed(seed)
    blocks = size * (torch.randn(2, 2, 32, 8, generator=draw) + torch.randn(8, generator=draw))
    coded = fake_quantise_keys(blocks, profile)
    before = (coded - blocks).double().square().sum()
    after = (smoothed(coded, correction(blocks, coded)) - blocks).double().square().sum()
    assert after <= before * (1 + 1e-6)


def test_it_brings_next_to_nothing():
    """Four of 32 tokens, whose errors are rounding noise: the whole error falls by a fiftieth."""
    blocks = torch.randn(64, 2, 32, 64, generator=torch.Generator().manual_seed(1))
    coded = fake_quantise_keys(blocks, "k8v8")
    before = (coded - blocks).square().mean().sqrt()
    after = (smoothed(coded, correction(blocks, coded)) - blocks).square().mean().sqrt()
    assert 0.97 < float(after / before) < 1


def test_tokens_between_the_edges_are_untouched():
    blocks = torch.randn(1, 1, 32, 4, generator=torch.Generator().manual_seed(2))
    coded = fake_quantise_keys(blocks, "literal")
    done = smoothed(coded, correction(blocks, coded))
    assert torch.equal(done[:, :, 2:30], coded[:, :, 2:30])
    assert not torch.equal(done, coded)
