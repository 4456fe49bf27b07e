"""Asking many questions at once is asking them one by one."""

import pytest
import torch

from engine.attention.config import HybridConfig
from engine.bench import kv_reading
from engine.bench.kv_probe import Probe, score_needles
from engine.bench.kv_reading import FULL, hybrid, prefill
from engine.bench.kv_texts import Question
from engine.bench.kv_topk import far_mass, with_budget
from engine.errors import EngineError
from tests.engine.tiny import MLA, MODEL, make_model

WINDOW = 48
DRAW = torch.Generator().manual_seed(0)


def _ids(count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, MODEL.vocab_size, (count,), generator=DRAW).tolist())


@pytest.mark.parametrize("model", [MODEL, MLA], ids=["grouped", "latent"])
def test_together_is_one_by_one(model):
    """Window-only, sparse and full; questions of different lengths across a block's edge."""
    policy = make_model(model)
    context = prefill(policy, _ids(200))
    questions = [Question(_ids(count), 0) for count in (9, 20, 33)]
    base = HybridConfig(window=WINDOW, topk=8, candidates=16)
    probe = Probe(policy, context, [question.ids[:-1] for question in questions], WINDOW)
    blind = base.model_copy(update={"index": "none"})
    seen = []
    for ours, variant in (
        (None, FULL),
        (base, hybrid("", base)),
        (blind, hybrid("", blind)),
        (with_budget(base, 40), hybrid("", with_budget(base, 40))),
    ):
        expected = kv_reading.score_needles(policy, context, questions, variant)
        found = score_needles(policy, probe, questions, ours)
        pairs = zip(expected.by_question, found.by_question, strict=True)
        assert all(abs(a[1] - b[1]) < 1e-4 for a, b in pairs)
        seen.append(found.nll)
    assert len({round(nll, 5) for nll in seen}) == len(seen), "the variants differ"


def test_mass_grows_with_k():
    policy = make_model(MODEL)
    context = prefill(policy, _ids(210))
    base = HybridConfig(window=WINDOW)
    mass, far = far_mass(
        Probe(policy, context, [_ids(40)], WINDOW), {k: with_budget(base, k) for k in (4, 32, 256)}
    )
    assert 0 < mass[4] < mass[32] < mass[256] <= 1 + 1e-6 and 0 < far < 1
    assert mass[256] == pytest.approx(1, abs=1e-5)


def test_a_question_must_fit_the_window():
    policy = make_model(MODEL)
    with pytest.raises(EngineError, match="49 tokens is longer than the window of 48"):
        Probe(policy, prefill(policy, _ids(100)), [_ids(49)], WINDOW)
