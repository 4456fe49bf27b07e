"""Texts fall into the terms that questions and blocks share."""

import pytest

from engine.kvcache.router.terms import cjk_share, terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The tenants' deposits", ["tenant", "deposit"]),
        ("Terminating, terminated: terminate!", ["termin"] * 3),
        ("Pay 1,500.50 by 2026", ["pay", "1,500.50", "2026"]),
        ("违约金", ["违约", "约金"]),
        ("租", ["租"]),
        ("ＡＰＩ 接口", ["api", "接口"]),
        ("API密钥v2", ["api", "密钥", "v", "2"]),
        ("what is the", []),
        ("我们怎么", ["们怎"]),
        ("Straße café", ["straße", "café"]),
        ("", []),
    ],
)
def test_terms(text, expected):
    assert terms(text) == expected


@pytest.mark.parametrize(
    ("text", "share"), [("late fee 5", 0.0), ("违约金 12", 1.0), ("API 接口的 key", 0.6), ("", 0.0)]
)
def test_share_of_cjk_writing(text, share):
    assert cjk_share(text) == pytest.approx(share)
