"""Philox4x32-10: known answers of Random123, and draws that depend on their names alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.light.draws import check_key, philox4x32, uniforms
from engine.runtime.types import DrawKey

ONES = [0xFFFFFFFF] * 4
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
KEY = DrawKey(run_seed=2**40 + 3, round=1, task=2, sample=3, stream=4)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (ONES, ONES[:2], "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (*PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: list[int], key: list[int], expected: str):
    """kat_vectors of Random123, philox4x32 with 10 rounds."""
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert " ".join(f"{word:08x}" for word in words[0]) == expected


def test_counter_and_key_words():
    """key = (seed_lo, seed_hi), counter = (position, sample | stream << 16, task, round); u from
    the upper 53 bits of two words."""
    words = philox4x32(
        np.array([[9, 3 | 4 << 16, 2, 1]], np.uint32), np.array([[3, 2**8]], np.uint32)
    )[0].astype(object)
    expected = (((words[0] << 32 | words[1]) >> 11) + 0.5) / 2**53
    assert uniforms([KEY], [9])[0] == expected


def test_a_batch_of_draws_is_its_single_draws():
    """Neighbours do not matter."""
    keys = [dataclasses.replace(KEY, sample=i) for i in range(50)]
    together = uniforms(keys, range(50))
    single = [uniforms([key], [i])[0] for i, key in enumerate(keys)]
    np.testing.assert_array_equal(together, single)
    assert len(set(single)) == 50


@pytest.mark.parametrize("field", ["run_seed", "round", "task", "sample", "stream"])
def test_each_name_changes_the_draw(field: str):
    """So do high bits of the seed, and the position."""
    other = dataclasses.replace(KEY, **{field: getattr(KEY, field) + 1})
    u = uniforms([KEY, other, dataclasses.replace(KEY, run_seed=3), KEY], [5, 5, 5, 6])
    assert len(set(u.tolist())) == 4


def test_draws_are_uniform_in_the_open_interval():
    """20,000 draws: mean, spread and largest gap as expected; never 0 or 1."""
    u = uniforms([KEY] * 20_000, range(20_000))
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.003
    assert np.abs(np.sort(u) - (np.arange(20_000) + 0.5) / 20_000).max() < 0.015


@pytest.mark.parametrize(
    "bad", [{"sample": 2**16}, {"stream": -1}, {"run_seed": 2**64}, {"task": 2**32}]
)
def test_names_that_do_not_fit_are_refused(bad: dict[str, int]):
    """Silent wrapping would give two episodes the same draws."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        check_key(dataclasses.replace(KEY, **bad))
