"""The synonym file: what it matches, and what it says when it cannot be used."""

import pytest

from engine.errors import RouterError
from engine.kvcache.router import SynonymTable

FILE = """
[[cluster]]
name = "charge"
confidence = 0.9
en = ["late fee", "liquidated damages", "penalty"]
zh = ["违约金", "滞纳金"]

[[cluster]]
name = "harm"
confidence = 0.5
en = ["damages", "harm"]
zh = ["违约", "损害"]
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "synonyms.toml"
    path.write_text(FILE, "utf-8")
    return SynonymTable.load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What PENALTIES apply?", {"charge": 0.9}),
        ("two late fees", {"charge": 0.9}),
        ("a fee, too late", {}),
        ("the liquidated damages", {"charge": 0.9}),
        ("liquidated harm", {"harm": 0.5}),
        ("滞纳金怎么算", {"charge": 0.9}),
        ("违约金", {"charge": 0.9}),
        ("违约责任和滞纳金", {"charge": 0.9, "harm": 0.5}),
        ("penalty 损害", {"charge": 0.9, "harm": 0.5}),
        ("nothing of it", {}),
    ],
)
def test_phrases_match_by_stem_or_substring_and_the_longest_wins(table, text, expected):
    assert table.find(text) == expected


def test_a_phrase_may_belong_to_two_clusters(tmp_path):
    path = tmp_path / "synonyms.toml"
    path.write_text(FILE.replace('"harm"]', '"harm", "penalty"]'), "utf-8")
    assert SynonymTable.load(path).find("penalty") == {"charge": 0.9, "harm": 0.5}


def test_an_empty_table_finds_nothing():
    assert SynonymTable().find("late fee 违约金") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[cluster]]\nname = 'x'\nconfidence = 0\nen = ['a', 'b']", "confidence"),
        ("[[cluster]]\nname = 'x'\nconfidence = 1\nen = ['a']", "at least two phrases"),
        ("[[cluster]]\nname = 'x'\nconfidence = 1\nen = ['a', '!']", "'!'.*holds no word"),
        ("[[cluster]]\nname = 'x'\nconfidence = 1\nfr = ['a', 'b']", "fr"),
        (FILE.replace('"harm"\n', '"charge"\n'), "two synonym clusters are called 'charge'"),
        ("[[cluster", "cannot be used"),
    ],
)
def test_a_file_that_cannot_work_is_refused(tmp_path, text, message):
    path = tmp_path / "synonyms.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(RouterError, match=f"(?s){message}"):
        SynonymTable.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RouterError, match=r"none\.toml"):
        SynonymTable.load(tmp_path / "none.toml")


def test_the_shipped_file_joins_the_terms_of_the_audit_that_asked_for_it():
    """The contract review that missed half of its clauses over these four words."""
    shipped = SynonymTable.load()
    names = {frozenset(shipped.find(word)) for word in ("违约金", "滞纳金", "罚金", "penalty")}
    assert names == {frozenset({"late payment charge"})}
    assert len(shipped.clusters) > 60
