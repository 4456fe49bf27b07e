"""Padding: tokens that repeat what the same turn said before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parl.trajectory import padding_share

TEXT = np.arange(40, dtype=np.int32)


def turns(*parts: np.ndarray) -> list[np.ndarray]:
    return list(parts)


def test_new_tokens_are_no_padding() -> None:
    assert padding_share(turns(TEXT, TEXT)) == 0.0, "another turn may ask the same again"
    assert padding_share([]) == 0.0
    assert padding_share(turns(np.zeros(0, np.int32))) == 0.0


def test_a_passage_said_twice() -> None:
    """20 of 60 tokens; a repeat shorter than the run is language, not padding."""
    assert padding_share(turns(np.concatenate([TEXT, TEXT[:20]]))) == pytest.approx(20 / 60)
    assert padding_share(turns(np.concatenate([TEXT, TEXT[:15]]))) == 0.0


def test_one_token_for_ever() -> None:
    """All but the first."""
    assert padding_share(turns(np.full(100, 7, np.int32))) == pytest.approx(99 / 100)


@given(st.lists(st.lists(st.integers(0, 3), max_size=80), max_size=4))
def test_a_share_is_a_share(rows: list[list[int]]) -> None:
    ids = [np.array(row, np.int32) for row in rows]
    share = padding_share(ids)
    assert 0 <= share < 1
    doubled = [np.concatenate([row, row]) for row in ids]
    if all(len(row) >= 16 for row in ids) and ids:
        assert padding_share(doubled) >= 0.5
