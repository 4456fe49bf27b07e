"""What a summary encoder owes, and how its start fails."""

import pytest
import torch

from engine.errors import RouterError
from engine.kvcache.router import ColdRouter, HashingEncoder, RouterConfig, check_encoder


class Cut(HashingEncoder):
    """Gives half of the numbers it promises."""

    def encode(self, texts):
        return super().encode(texts)[:, :256]


class Long(HashingEncoder):
    """Does not normalise."""

    def encode(self, texts):
        return 3 * super().encode(texts)


def test_the_dimension_is_the_encoders():
    router = ColdRouter(HashingEncoder(96), config=RouterConfig(summary_dimension=96))
    router.add({4: "text"})
    assert router.summary(4).shape == (1, 96)


def test_another_dimension_than_configured_stops_at_start():
    with pytest.raises(RouterError, match=r"summary_dimension is 1024 but .*hashing-512.* 512"):
        ColdRouter(HashingEncoder(512), config=RouterConfig(summary_dimension=1024))


@pytest.mark.parametrize(
    ("encoder", "message"), [(Cut(512), r"\(2, 256\).*\(2, 512\)"), (Long(64), "expected 1")]
)
def test_an_encoder_that_is_not_what_it_says_stops_at_start(encoder, message):
    with pytest.raises(RouterError, match=message):
        ColdRouter(encoder)


def test_hashing_vectors_depend_on_their_text_alone():
    encoder = HashingEncoder(128)
    check_encoder(encoder)
    texts = ["late fee", "违约金", "", "!!!"]
    together = encoder.encode(texts)
    alone = torch.cat([encoder.encode([text]) for text in reversed(texts)]).flip(0)
    assert torch.equal(together, alone)


def test_spelling_variants_are_near_and_other_words_are_not():
    a, b, c = HashingEncoder(1024).encode(["terminating contracts", "termination contract", "sky"])
    assert a @ b > 0.5 > abs(a @ c)
