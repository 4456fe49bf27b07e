"""Inverse-CDF sampling: supports, logprobs and rows that do not see each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.errors import InvalidStateError
from engine.light.sampler import RowRules, check_sampling, sample
from engine.light.sampler import draw as draw_rows
from engine.runtime.types import Sampling

LOGITS = arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    # a grid: two logits closer than float64 tells after exp have no order to agree on
    elements=st.integers(-120, 120).map(lambda quarter: np.float32(quarter / 4)),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    top_k=st.integers(0, 12),
)


def reference(row: np.ndarray, params: Sampling) -> np.ndarray:
    """Probabilities float64 [V], the obvious way."""
    if params.temperature == 0:
        return np.eye(len(row))[row.argmax()]
    p = np.exp((row.astype(np.float64) - row.max()) / params.temperature)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = order[: params.top_k] if params.top_k else order
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += p[i] / p[order].sum()
        if mass >= params.top_p:
            break
    out = np.zeros(len(row))
    out[kept] = p[kept]
    return out / out.sum()


@given(LOGITS, SAMPLINGS, st.floats(0.001, 0.999))
def test_logprob_is_that_of_the_sampled_distribution(logits, params, u):
    """Every token is in the support, with its own probability, after all truncation."""
    params = Sampling(params.temperature, params.top_p, params.top_k % (logits.shape[1] + 1))
    ids, logprobs = sample(logits, np.full(len(logits), u), [params] * len(logits))
    for row, token, logprob in zip(logits, ids, logprobs, strict=True):
        expected = reference(row, params)
        assert expected[token] > 0
        np.testing.assert_allclose(np.exp(logprob), expected[token], rtol=1e-4)


@given(LOGITS, st.lists(SAMPLINGS, min_size=5, max_size=5), st.randoms())
def test_rows_do_not_see_each_other(logits, params, random):
    """One by one = together."""
    u = np.array([random.random() for _ in range(len(logits))])
    params = params[: len(logits)]
    ids, logprobs = sample(logits, u, params)
    for i in range(len(logits)):
        one_id, one_logprob = sample(logits[i : i + 1], u[i : i + 1], [params[i]])
        assert (one_id[0], one_logprob[0]) == (ids[i], logprobs[i])


SHAPED = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.6, 1.0]),
    top_k=st.integers(0, 6),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.75, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 0.5]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([-100.0, -1.25, 2.5])), max_size=3
    ).map(tuple),
)


@st.composite
def shaped_rows(draw):
    """(logits, params, rules, history) of rows over six tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        params = draw(SHAPED)
        counts = np.array(draw(st.lists(st.integers(0, 3), min_size=6, max_size=6)), np.int32)
        allowed = draw(st.none() | st.lists(st.booleans(), min_size=6, max_size=6).filter(any))
        rules = RowRules(
            counts,
            counts > 0,
            None if allowed is None else np.array(allowed),
            draw(st.integers(0, 8)),
        )
        quarters = draw(st.lists(st.integers(-40, 40), min_size=6, max_size=6, unique=True))
        # an odd grid: penalties in quarters make no ties with it
        logits = np.array(quarters, np.float32) / 4 + np.arange(6, dtype=np.float32) / 64
        rows.append((logits, params, rules))
    return rows


def shaped_reference(row: np.ndarray, params: Sampling, rules: RowRules) -> np.ndarray:
    """Probabilities float64 [V] after penalties, bias, constraint and all truncation."""
    z = [float(x) for x in row]
    assert rules.counts is not None
    for i, count in enumerate(rules.counts.tolist()):
        if count:
            z[i] = (
                z[i] / params.repetition_penalty if z[i] > 0 else z[i] * params.repetition_penalty
            )
            z[i] -= params.presence_penalty
        z[i] -= params.frequency_penalty * count
    for token, amount in params.logit_bias:
        z[token] += amount
    kept = [i for i in range(len(z)) if rules.allowed is None or rules.allowed[i]]
    p = {i: math.exp((z[i] - max(z[j] for j in kept)) / (params.temperature or 1)) for i in kept}
    kept.sort(key=lambda i: (-p[i], i))
    kept = kept[: params.top_k] if params.top_k else kept
    total, mass, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += p[i] / total
        if params.top_p < 1 and mass >= params.top_p:
            break
    kept = [i for i in nucleus if p[i] >= params.min_p * p[nucleus[0]]]
    out = np.zeros(len(z))
    out[kept] = [p[i] for i in kept]
    return out / out.sum()


@given(shaped_rows(), st.floats(0.001, 0.999))
def test_penalties_bias_constraint_min_p_and_alternatives(rows, u):
    """Each row is sampled from the distribution that a plain reference computes, and its
    alternatives are that distribution's likeliest tokens."""
    ids, logprobs, tops = draw_rows(
        np.array([row[0] for row in rows]),
        np.full(len(rows), u),
        [row[1] for row in rows],
        [row[2] for row in rows],
    )
    for (logits, params, rules), token, logprob, top in zip(rows, ids, logprobs, tops, strict=True):
        expected = shaped_reference(logits, params, rules)
        if params.temperature:
            np.testing.assert_allclose(np.exp(logprob), expected[token], rtol=1e-4)
        else:
            assert (token, logprob) == (expected.argmax(), 0.0)
        assert (top is None) == (rules.num_logprobs == 0)
        if top is not None:
            likeliest = [i for i in np.argsort(-expected) if expected[i] > 0][: rules.num_logprobs]
            n = len(likeliest)
            assert top.ids[:n].tolist() == likeliest and set(top.ids[n:].tolist()) <= {-1}
            # as logarithms: a bias of -100 is below what float32 has for probabilities
            wanted = np.log(expected[likeliest])
            np.testing.assert_allclose(top.logprobs[:n], wanted, rtol=1e-4, atol=1e-4)
            assert not np.isfinite(top.logprobs[n:]).any()


def test_frequencies_match_probabilities():
    """An even grid of draws gives each token its share."""
    logits = np.array([[0.0, 1.0, -1.0, 2.0]], np.float32)
    grid = (np.arange(10_000) + 0.5) / 10_000
    ids, _ = sample(logits.repeat(10_000, axis=0), grid, [Sampling()] * 10_000)
    shares = np.bincount(ids, minlength=4) / 10_000
    np.testing.assert_allclose(shares, reference(logits[0], Sampling()), atol=2e-4)


def test_a_draw_walks_the_tokens_in_order():
    """Token i is drawn for u in [cdf(i - 1), cdf(i)): the order is that of the ids."""
    logits = np.array([[1.0, 3.0, 0.5, 2.0, -1.0]], np.float32)
    cdf = np.concatenate([[0.0], reference(logits[0], Sampling()).cumsum()])
    for token in range(5):
        for u in (cdf[token] + 1e-9, cdf[token + 1] - 1e-9):
            assert sample(logits, np.array([u]), [Sampling()])[0][0] == token


@pytest.mark.parametrize("u", [0.0, 1e-300, 1.0 - 2**-53, 1.0])
def test_the_edges_of_the_draw_stay_in_the_support(u: float):
    """Tokens without mass are never sampled, not even at the ends."""
    logits = np.array([[-np.inf, 3.0, 1.0, -np.inf]], np.float32)
    ids, logprobs = sample(logits, np.array([u]), [Sampling()])
    assert ids[0] in (1, 2) and np.isfinite(logprobs).all()


@pytest.mark.parametrize(
    "params",
    [
        Sampling(-1.0),
        Sampling(1.0, 0.0),
        Sampling(1.0, 1.5),
        Sampling(1.0, 1.0, -1),
        Sampling(float("nan")),
        Sampling(float("inf")),
    ],
)
def test_settings_that_name_no_distribution(params: Sampling):
    """Refused before a step begins; NaN passes every comparison the wrong way round."""
    with pytest.raises(InvalidStateError, match="expected temperature"):
        check_sampling(params)


@pytest.mark.parametrize(
    "params",
    [
        Sampling(min_p=1.5),
        Sampling(min_p=float("nan")),
        Sampling(repetition_penalty=0.0),
        Sampling(presence_penalty=float("inf")),
        Sampling(frequency_penalty=float("nan")),
        Sampling(logit_bias=((3, float("inf")),)),
        Sampling(logit_bias=((83, 1.0),)),
        Sampling(seed=-1),
        Sampling(seed=2**64),
    ],
)
def test_shapes_that_name_no_distribution(params: Sampling):
    """Refused too, with what was expected."""
    with pytest.raises(InvalidStateError, match="expected"):
        check_sampling(params, vocab_size=83)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30])
def test_extreme_temperatures(temperature: float):
    """Near zero is greedy, near infinity is uniform; never NaN."""
    logits = np.array([[5.0, 9.0, 7.0, 9.0]], np.float32)
    ids, logprobs = sample(logits, np.array([0.9]), [Sampling(temperature)])
    assert ids[0] == 3
    np.testing.assert_allclose(logprobs[0], np.log(0.5 if temperature < 1 else 0.25), rtol=1e-6)
