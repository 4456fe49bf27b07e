"""Philox draws: the published known answers, and independence of call order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.light.draws import check_key, philox4x32, uniforms
from engine.runtime.types import DrawKey

ONES = 0xFFFFFFFF
KEYS = st.builds(
    DrawKey,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], words: list[int]):
    """kat_vectors of Random123: zeros, ones, digits of pi."""
    out = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert out.tolist() == [words]


@given(st.lists(st.tuples(KEYS, st.integers(0, 2**31)), max_size=8), st.randoms())
def test_order_and_company_do_not_matter(draws, random):
    """A draw is a function of its own names."""
    random.shuffle(draws)
    together = uniforms([key for key, _ in draws], [position for _, position in draws])
    alone = [uniforms([key], [position])[0] for key, position in draws]
    assert together.tolist() == alone
    assert ((together > 0) & (together < 1)).all()


@pytest.mark.parametrize("name", ["run_seed", "round", "task", "sample", "stream"])
def test_each_name_counts(name: str):
    """Changing any field, or the position, is another draw."""
    base = DrawKey(3, 1, 1, 1, 1)
    other = DrawKey(**{**{f: getattr(base, f) for f in DrawKey.__slots__}, name: 2})
    first, second, third = uniforms([base, other, base], [5, 5, 6])
    assert len({first, second, third}) == 3


def test_draws_look_uniform():
    """Mean and deciles of 20,000 draws of one stream."""
    u = uniforms([DrawKey(1)] * 20_000, range(20_000))
    assert abs(u.mean() - 0.5) < 0.01
    counts, _ = np.histogram(u, bins=10, range=(0, 1))
    assert (abs(counts - 2000) < 200).all()


@pytest.mark.parametrize(
    "key",
    [DrawKey(2**64), DrawKey(-1), DrawKey(0, round=2**32), DrawKey(0, sample=2**16)],
)
def test_keys_that_do_not_fit_are_refused(key: DrawKey):
    """Two names must not share a counter word."""
    with pytest.raises(ValueError, match="does not fit"):
        check_key(key)
