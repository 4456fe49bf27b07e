"""The packaged MiniLM encoder: real weights, nothing fetched."""

import pytest
import torch

from engine.bench.paraphrases import paraphrase_set
from engine.bench.router import Remembering, make_router, recall
from engine.errors import RouterError
from engine.kvcache.router import MiniLMEncoder, RouterConfig, check_encoder


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(RouterError, match=r"no model\.safetensors in"):
        MiniLMEncoder(tmp_path)


@pytest.fixture(scope="module")
def encoder():
    torch.set_num_threads(1)
    return MiniLMEncoder()


@pytest.mark.slow
def test_the_encoder_tells_its_dimension_and_keeps_its_word(encoder):
    check_encoder(encoder, expected_dimension=384)
    assert encoder.dimension == 384
    with pytest.raises(RouterError, match=r"summary_dimension is 1024 .* 384"):
        check_encoder(encoder, expected_dimension=1024)


@pytest.mark.slow
def test_a_vector_is_a_function_of_its_text_alone(encoder):
    texts = ["late fee", "a much longer text about rents and deposits of flats", "违约金"]
    together = encoder.encode(texts)
    alone = torch.cat([encoder.encode([text]) for text in reversed(texts)]).flip(0)
    assert torch.equal(together, alone)


@pytest.mark.slow
def test_meaning_is_nearer_than_spelling(encoder):
    a, b, c = encoder.encode(
        [
            "How do I get reimbursed?",
            "We refund purchases within two weeks.",
            "How do I get to the station?",
        ]
    )
    assert a @ b > a @ c


@pytest.mark.slow
def test_long_texts_are_split_and_nothing_is_cut_off(encoder):
    text = "  " + " ".join(f"clause {i} of the agreement," for i in range(120)) + "\n"
    chunks = encoder.split(text)
    assert len(chunks) > 2 and "".join(chunks) == text
    assert all(len(encoder._model.tokenizer(chunk)["input_ids"]) <= 256 for chunk in chunks)
    assert encoder.split("short") == ["short"] and encoder.split("") == [""]


@pytest.mark.slow
def test_encoder_and_synonyms_together_find_more_than_each(encoder):
    pool = paraphrase_set()
    questions = pool.of("tune", "first")
    remembering = Remembering(encoder)
    only = RouterConfig(encoder_weight=1.0, encoder_weight_cjk=1.0, fallback_below=1.0)
    both = recall(make_router(pool, remembering, True, RouterConfig()), questions)
    meaning = recall(make_router(pool, remembering, False, only), questions)
    synonyms = recall(make_router(pool, None, True, RouterConfig()), questions)
    assert both.at(8) > max(meaning.at(8), synonyms.at(8))
    assert meaning.at(8, "en") > 0.6
