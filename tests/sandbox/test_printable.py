"""Text of a box in a terminal and in a log."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.backends.printable import printable


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("plain 合同", "plain 合同", "plain 合同"),
        ("a\nb\tc", "a\\nb\\tc", "a\nb\tc"),
        ("a\r\nb", "a\\r\\nb", "a\r\nb"),
        ("done\rlevel=error", "done\\rlevel=error", "done\\rlevel=error"),
        ("\x1b[31mred\x07\x9b", "\\x1b[31mred\\x07\\x9b", "\\x1b[31mred\\x07\\x9b"),
        ("\u202eabc\u2028", "\\u202eabc\\u2028", "\\u202eabc\\u2028"),
        ("\ud800", "\\ud800", "\\ud800"),
        ("", "", ""),
    ],
)
def test_controls_are_written_out(text: str, line: str, lines: str):
    """One line for logs; tabs and line ends stay where a person reads."""
    assert printable(text) == line
    assert printable(text, lines=True) == lines


@given(st.text(st.characters(categories=None)), st.booleans())
def test_any_text_becomes_harmless_and_encodable(text: str, lines: bool):
    """No control character but those asked for, valid UTF-8, and a fixed point."""
    shown = printable(text, lines=lines)
    shown.encode()
    controls = {char for char in shown if unicodedata.category(char) == "Cc"}
    assert controls <= ({"\n", "\t", "\r"} if lines else set())
    assert printable(shown, lines=lines) == shown
    assert len(printable(text, most=10)) <= 10
