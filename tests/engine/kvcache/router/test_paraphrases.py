"""The paraphrase set is what the recall table says it is, and the table is made on it."""

import pytest

from engine.bench.paraphrases import paraphrase_set
from engine.bench.router import Remembering, make_router, recall, report
from engine.kvcache.router import HashingEncoder, RouterConfig


@pytest.fixture(scope="module")
def pool():
    return paraphrase_set(num_distractors=120)


def test_at_least_200_test_questions_in_two_languages_by_two_authors(pool):
    assert len(pool.of("test")) >= 200 and len(pool.of("test", "second")) >= 120
    assert len({q.text for q in pool.questions}) == len(pool.questions)
    assert all(q.half == "test" and q.author == "second" for q in pool.questions if q.new_fact)
    for half in ("tune", "test"):
        of_half = pool.of(half)
        assert len(of_half) >= 90
        assert 0.35 < sum(q.language == "zh" for q in of_half) / len(of_half) < 0.65
    facts = {half: {q.fact_id for q in pool.of(half)} for half in ("tune", "test")}
    assert not facts["tune"] & facts["test"]


def test_questions_do_not_copy_the_words_of_their_block(pool):
    """The first author took care of it; the second wrote as people ask."""
    for author, most, mean in (("first", 0.5, 0.05), ("second", 1.0, 0.25)):
        of_author = [q for q in pool.questions if q.author == author]
        overlaps = [pool.overlap(question) for question in of_author]
        assert max(overlaps) <= most and sum(overlaps) / len(overlaps) < mean


def test_the_set_is_the_same_for_a_seed(pool):
    assert paraphrase_set(num_distractors=120) == pool
    assert paraphrase_set(seed=1, num_distractors=120) != pool


def test_synonyms_find_what_words_cannot(pool):
    """On the tune half: a gate here must not be why something is chosen for the test half."""
    config = RouterConfig()
    words = recall(make_router(pool, None, False, config), pool.of("tune", "first"))
    synonyms = recall(make_router(pool, None, True, config), pool.of("tune", "first"))
    assert words.at(8) < 0.3 and synonyms.at(8) > 0.5
    assert synonyms.at(8, "en") > 0.4 and synonyms.at(8, "zh") > 0.4


def test_the_table_has_a_row_a_router(pool):
    text = report(pool, Remembering(HashingEncoder(64)), RouterConfig())
    for row in ("lexical", "lexical + synonyms", "encoder only", "lexical, encoder + synonyms"):
        # once with its cost, once for each part of the questions
        assert text.count(f"\n{row:<30}") == 6
