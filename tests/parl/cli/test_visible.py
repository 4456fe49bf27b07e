"""What models write cannot drive a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parl.cli.visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("\x1b[2J", r"\x1b[2J"), ("\r", r"\r"), ("\ud800", r"\ud800"),
     ("城市é", "城市é"), ("\u202eabc", r"\u202eabc")],
)  # fmt: skip
def test_control_characters_are_spelled_out(text: str, shown: str):
    assert visible(text) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_anything_can_be_printed(text: str):
    visible(text).encode()
    assert visible(visible(text)) == visible(text)
