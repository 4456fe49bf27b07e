"""D7: loops in text without calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.loops import in_code_fence, repeated_suffix, repeated_turns


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ([7] * 8, 1),
        ([7] * 7, None),
        ([1, 2, 3] * 8, 3),
        ([9, 9, *([1, 2, 3] * 8)], 3),
        ([1, 2, 3] * 8 + [4], None),
        (list(range(64)) * 8, 64),
        (list(range(65)) * 8, None),
        ([], None),
        ([1, 1, 2] * 8, 3),
    ],
)
def test_repeated_suffix(ids: list[int], period: int | None):
    """Eight repetitions of at most 64 tokens at the very end."""
    assert repeated_suffix(ids) == period


def test_code_is_no_loop():
    """Inside an open fence rows may repeat; after it they may not."""
    ids = [1, 2] * 8
    assert repeated_suffix(ids, text="see\n```py\n0, 0,\n") is None
    assert repeated_suffix(ids, text="see\n```\nx\n```\nha ha") == 2
    assert in_code_fence("```") and not in_code_fence("use ``` here")


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8), st.integers(2, 5))
def test_the_suffix_is_what_it_says(ids: list[int], max_period: int, times: int):
    """Against the definition, spelled out."""
    wanted = None
    for period in range(1, max_period + 1):
        tail = ids[len(ids) - period * times :]
        if len(ids) >= period * times and tail == tail[:period] * times:
            wanted = period
            break
    assert repeated_suffix(ids, max_period=max_period, times=times) == wanted


@pytest.mark.parametrize(
    ("texts", "repeats"),
    [
        (["I will now look at the file."] * 3, True),
        (["I will now look at the file."] * 2, False),
        (["i will NOW look at it all", "I will now look at it all!", "I will, now look at it all"],
         True),
        (["我现在去看这个文件。", "我现在去看这个文件", "我 现在去看这个文件！"], True),
        (["Step one is done.", "Step two is done.", "Step three is done."], False),
        (["I look at a.py", "I look at b.py and then at its tests", "All tests pass"], False),
        (["", "", ""], True),
        (["ok", "ok", "done"], False),
    ],
)  # fmt: skip
def test_repeated_turns(texts: list[str], repeats: bool):
    """Three near-equal turns; case, width and punctuation do not make them different."""
    assert repeated_turns(texts) == repeats
