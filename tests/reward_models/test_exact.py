"""Exact checks: one answer, however it is spelt, and nothing that only looks like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.verifiers.exact import exact_integer, exact_text, integer, normalise


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" 42\n", 42),
        ("42.", 42),
        ("42.0", 42),
        ("+1,000", 1000),
        ("-7", -7),
        ("\u22127", -7),
        ("\uff14\uff12", 42),
        ("007", 7),
        ("-0", 0),
    ],
)
def test_an_integer_is_read_however_it_is_written(text: str, value: int):
    """Signs, thousands, trailing zeros, full-width digits and the typographic minus."""
    assert integer(text) == value and exact_integer(text, value) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "the answer is 42",
        "42 43",
        "4,2",
        "1,00",
        "1.5",
        "--7",
        "1e3",
        "0x10",
        "4_2",
        "\u0664\u0662",
        "cannot determine",
        "9" * 19,
    ],
)
def test_anything_else_is_no_integer(text: str):
    """Words, two numbers, fractions and Python-only spellings: wrong, never an exception."""
    assert integer(text) is None and exact_integer(text, 42) == 0.0


@pytest.mark.parametrize(
    "attack", ["", " ", ".", ":", "\u3002", "Solution", "Thought process:", "output 5"]
)
def test_master_keys_open_nothing(attack: str):
    """Punctuation and openers that fool judges (facts 3.7) are wrong, also where the expected text
    normalises to nothing."""
    assert exact_integer(attack, 5) == 0.0 and exact_text(attack, "5") == 0.0
    assert exact_text(attack, "") == 0.0 and exact_text(attack, ".") == 0.0


def test_text_is_compared_without_case_and_spacing():
    """Only what carries no meaning is ignored."""
    assert exact_text("  New\u00a0\tYork. ", "new york") == 1.0
    assert exact_text("New York City", "new york") == 0.0


@given(st.integers(-(10**18) + 1, 10**18 - 1), st.integers(-(10**18) + 1, 10**18 - 1))
def test_only_the_right_integer_is_right(value: int, other: int):
    """Every integer of up to 18 digits is found, plain or grouped, and no other one."""
    for text in (str(value), f"{value:,}", f" {value}. "):
        assert exact_integer(text, value) == 1.0
        assert exact_integer(text, other) == float(value == other)


@given(st.text(max_size=30))
def test_normalising_twice_is_once(text: str):
    """A stored normal form stays what it is, and any text can be checked."""
    once = normalise(text)
    assert normalise(once) == once
    assert exact_text(text, text) == float(once != "")
    assert integer(text) is None or isinstance(integer(text), int)
