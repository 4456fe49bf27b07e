"""What counts as giving up, and what is an answer that only sounds like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.abstain import MAX_CHARS, gives_up, says_nothing


@pytest.mark.parametrize(
    "text",
    [
        "I cannot determine the answer.",
        "Sorry, I can't answer that.",
        "I can’t tell.",
        "I don't know",
        "I do not really know.",
        "The total could not be computed from the files.",
        "It is impossible to say.",
        "I am unable to find the clause.",
        "There is not enough information.",
        "Insufficient data",
        "无法确定。",
        "抱歉，我不知道答案",
        "根据现有资料，无法准确判断。",
        "信息不足，无法回答",
    ],
)
def test_giving_up(text: str):
    assert gives_up(text) and not says_nothing(text)


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "...", "unknown", "N/A", "**None**", "IDK", "“未知”", "ｕｎｋｎｏｗｎ", "无。"],
)
def test_saying_nothing(text: str):
    """Wrong or right is the verifier's word."""
    assert says_nothing(text) and not gives_up(text)


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "0",
        "no",
        "The answer is unknown to most, but it is 42.",
        "I cannot determine the second digit from the log alone, so I used the file: 17",
        "None of the clauses applies.",
        "The cause is a lack of memory.",
        "北京",
        "答案是 12",
        "虽然我不确定单位，但结果是 35 元",
        "Known unknowns: risk",
        "passed",
        "Pass the parcel",
    ],
)
def test_answers(text: str):
    assert not gives_up(text) and not says_nothing(text)


def test_a_long_text_is_an_answer():
    """Somewhere in a report something is always unclear."""
    assert not gives_up("x " * MAX_CHARS + "I cannot determine more.")


@given(st.text(max_size=400))
def test_any_text_has_a_verdict(text: str):
    assert not (gives_up(text) and says_nothing(text))
