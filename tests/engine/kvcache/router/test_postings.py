"""Postings stay right while blocks come and go."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kvcache.router.postings import Postings

BLOCKS = st.dictionaries(
    st.integers(0, 9), st.lists(st.sampled_from("abcdefg"), min_size=0, max_size=6), max_size=8
)


def _index(blocks: dict[int, list[str]]) -> Postings:
    postings = Postings(1.2, 0.75)
    for block_id, words in blocks.items():
        postings.add(block_id, words)
    return postings


@settings(max_examples=30, deadline=None)
@given(BLOCKS, st.lists(st.integers(0, 9)), st.lists(st.sampled_from("abcdefgh"), min_size=1))
def test_removing_blocks_is_as_if_they_had_never_come(blocks, removed, asked):
    postings = _index(blocks)
    for block_id in set(removed) & set(blocks):
        postings.remove(block_id)
    fresh = _index({b: words for b, words in blocks.items() if b not in removed})
    assert postings.search(dict.fromkeys(asked, 1.0)) == fresh.search(dict.fromkeys(asked, 1.0))


@settings(max_examples=30, deadline=None)
@given(BLOCKS, st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 1.0), min_size=1))
def test_scores_are_the_textbook_sum(blocks, weights):
    """Over every block, without postings."""
    found = _index(blocks).search(weights)
    mean = sum(map(len, blocks.values())) / max(1, len(blocks)) or 1.0
    for block_id, words in blocks.items():
        score = total = 0.0
        for term, weight in weights.items():
            holders = sum(term in other for other in blocks.values())
            idf = weight * math.log(1 + (len(blocks) - holders + 0.5) / (holders + 0.5))
            total += idf
            count = words.count(term)
            norm = 1.2 * (0.25 + 0.75 * len(words) / mean)
            score += idf * count / (count + norm) if count else 0.0
        if score:
            assert math.isclose(found[block_id].score, score / total)
            assert 0 < found[block_id].score < 1 and 0 < found[block_id].coverage <= 1 + 1e-12
        else:
            assert block_id not in found
