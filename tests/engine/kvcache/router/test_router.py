"""The cold router names the blocks that a question needs."""

import pytest
import torch

from engine.errors import RouterError
from engine.kvcache.router import ColdRouter, HashingEncoder, RouterConfig, SynonymTable

TEXTS = {
    3: "If payment is late, liquidated damages of 5 percent accrue every month.",
    5: "The tenant pays a security deposit of 3 monthly rents.",
    6: "The landlord returns it within 40 days after moving out.",
    8: "Lunch is served in the canteen from noon.",
    9: "逾期付款的，每日按万分之五支付违约金。",
}


@pytest.fixture(scope="module")
def synonyms():
    return SynonymTable.load()


@pytest.fixture
def router(synonyms):
    router = ColdRouter(HashingEncoder(), synonyms)
    router.add(TEXTS)
    return router


def test_words_lead_to_their_block_and_say_so(router):
    route = router.route("How many rents is the deposit?", budget=2)
    assert route.block_ids[0] == 5
    assert "words: rent, deposit" in route.blocks[0].reasons
    scores = [block.score for block in router.route("rents, lunch, moving", budget=9).blocks]
    assert len(scores) >= 3 and scores == sorted(scores, reverse=True)


def test_a_synonym_leads_to_a_block_without_the_word_in_either_language(router):
    lexical = ColdRouter(None, SynonymTable.load())
    lexical.add(TEXTS)
    for question in ("late fee?", "滞纳金是多少"):
        blocks = lexical.route(question, budget=4).blocks
        assert {block.block_id for block in blocks} == {3, 9}
        assert any("synonyms: " in reason for reason in blocks[0].reasons)
    without = ColdRouter(None)
    without.add(TEXTS)
    assert 9 not in without.route("late fee?", budget=4).block_ids


def test_confident_postings_spare_the_search_of_all_summaries(router):
    sure = router.route("security deposit of the tenant", budget=5)
    assert sure.searched == "postings" and sure.confidence > 0.9
    assert 8 not in sure.block_ids


def test_low_confidence_falls_back_to_every_cold_block(router):
    route = router.route("luncheons in canteenery", budget=5)
    assert route.searched == "all" and route.confidence < 0.5
    assert route.block_ids[0] == 8
    assert any(reason.startswith("summary: ") for reason in route.blocks[0].reasons)


def test_the_threshold_can_forbid_or_force_the_fallback(synonyms):
    question = "luncheons in canteenery"
    never = ColdRouter(HashingEncoder(), synonyms, RouterConfig(fallback_below=0.0))
    always = ColdRouter(HashingEncoder(), synonyms, RouterConfig(fallback_below=1.0))
    for router, searched in ((never, "postings"), (always, "all")):
        router.add(TEXTS)
        assert router.route(question, 3).searched == searched


def test_an_edited_synonym_file_takes_effect_without_new_summaries(router, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[cluster]]\nname = "food"\nconfidence = 1.0\nen = ["lunch", "chow"]\n', "utf-8"
    )
    before = router.summary(8)
    router.use_synonyms(SynonymTable.load(path))
    route = router.route("chow", budget=1)
    assert route.block_ids == (8,) and "synonyms: food" in route.blocks[0].reasons
    assert torch.equal(before, router.summary(8))


def test_warm_blocks_are_not_named(router):
    router.warmed([5])
    assert len(router) == 4 and 5 not in router.route("tenant deposit rents", 5).block_ids
    router.evicted([5])
    assert router.route("tenant deposit rents", 5).block_ids[0] == 5


def test_summaries_and_routes_are_bit_equal_after_ten_evictions():
    """Made once from source text, never from a summary: there is nothing that could drift."""
    encoded: list[str] = []

    class Recording(HashingEncoder):
        def encode(self, texts):
            encoded.extend(texts)
            return super().encode(texts)

    router = ColdRouter(Recording())
    router.add(TEXTS)
    first = {block_id: router.summary(block_id) for block_id in TEXTS}
    route = router.route("deposit of the landlord", 5)
    encoded.clear()
    for round_ in range(10):
        order = sorted(TEXTS, key=lambda block_id: (block_id * 7 + round_) % 5)
        router.warmed(order[: 2 + round_ % 3])
        router.evicted(reversed(order[: 2 + round_ % 3]))
    assert encoded == []
    assert all(torch.equal(first[block_id], router.summary(block_id)) for block_id in TEXTS)
    assert router.route("deposit of the landlord", 5) == route


def test_a_summary_handed_out_cannot_be_changed(router):
    router.summary(3).zero_()
    assert router.summary(3).norm() == pytest.approx(1.0)


def test_long_texts_have_a_summary_a_chunk_and_the_best_counts():
    router = ColdRouter(HashingEncoder(chunk_chars=60), config=RouterConfig(encoder_weight=1.0))
    router.add({0: "nothing to see in this long introduction " * 4 + "the canteen lunch menu"})
    router.add({1: "nothing to see in this long introduction " * 4 + "security deposits"})
    assert router.summary(0).shape[0] > 2
    assert router.route("canteen lunches", 1).block_ids == (0,)


def test_stored_summaries_come_back_or_are_refused(router):
    other = ColdRouter(HashingEncoder())
    other.restore(3, TEXTS[3], router.summary(3))
    assert torch.equal(other.summary(3), router.summary(3))
    with pytest.raises(RouterError, match=r"block 4 is \(1, 384\).*512"):
        other.restore(4, "text", torch.zeros(1, 384))


def test_neighbours_come_along_within_the_budget(synonyms):
    router = ColdRouter(None, synonyms, RouterConfig(neighbours=1))
    router.add(TEXTS)
    route = router.route("security deposit of the tenant", budget=2)
    assert route.block_ids == (5, 6) and route.blocks[1].reasons == ("next to block 5",)
    assert router.route("security deposit of the tenant", budget=1).block_ids == (5,)


def test_a_block_of_special_tokens_is_never_named(router):
    router.add({20: " \n"})
    assert 20 not in router.route("anything at all, canteen", 9).block_ids


def test_nothing_cold_and_nothing_asked(synonyms):
    router = ColdRouter(HashingEncoder(), synonyms)
    assert router.route("late fee", 4).blocks == ()
    router.add(TEXTS)
    assert router.route("", 4).confidence == 0.0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda r: r.add({3: "again"}), "block 3 has its summary"),
        (lambda r: r.warmed([77]), "block 77 is unknown"),
        (lambda r: r.evicted([3]), "block 3 is cold already"),
        (lambda r: r.route("x", 0), "budget 0"),
        (lambda r: ColdRouter(None).summary(3), "no encoder"),
    ],
)
def test_misuse_is_named(router, act, message):
    with pytest.raises(RouterError, match=message):
        act(router)


def test_released_blocks_are_forgotten(router):
    router.warmed([6])
    router.remove([5, 6])
    assert len(router) == 3
    router.add({5: "a new text"})
    assert router.route("new text", 1).block_ids == (5,)
