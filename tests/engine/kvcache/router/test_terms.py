"""Texts fall into the terms that questions and blocks share."""

import pytest

from engine.kvcache.router.terms import terms


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
