"""Sampling by inverse CDF: a token depends on its logits and its uniform draw alone.

Order: penalties, logit bias, constraint, temperature, top-k, top-p, min-p. Penalties are those of
vLLM and OpenAI: repetition divides a positive logit and multiplies a negative one; presence is
subtracted once, frequency once for each time the token was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.errors import InvalidStateError
from engine.runtime.types import Sampling

MAX_ALTERNATIVES = 20


@dataclass(slots=True)
class RowRules:
    """What shapes one row besides its Sampling; None = nothing.

    counts: int32 [V], how often a token was sampled; seen: bool [V], tokens of the context;
    allowed: bool [V], by the constraint; num_logprobs: alternatives wanted.
    """

    counts: np.ndarray | None = None
    seen: np.ndarray | None = None
    allowed: np.ndarray | None = None
    num_logprobs: int = 0


class Alternatives(NamedTuple):
    """The likeliest tokens, likeliest first: ids int32 [k], logprobs float32 [k]; -1 and -inf where
    fewer can be sampled."""

    ids: np.ndarray
    logprobs: np.ndarray


class Drawn(NamedTuple):
    """ids int32 [N], logprobs float32 [N], alternatives of the rows that want them."""

    ids: np.ndarray
    logprobs: np.ndarray
    tops: list[Alternatives | None]


DrawRows = Callable[[np.ndarray, np.ndarray, Sequence[Sampling], Sequence[RowRules | None]], Drawn]
"""``draw``, or what does the same."""


def check_sampling(params: Sampling, vocab_size: int | None = None) -> None:
    """InvalidStateError for a setting that names no distribution."""
    # written so that NaN fails
    if not (0 <= params.temperature < math.inf and 0 < params.top_p <= 1 and params.top_k >= 0):
        raise InvalidStateError(
            f"{params}: expected temperature >= 0 and finite, 0 < top_p <= 1, top_k >= 0 (0 = all "
            "tokens)"
        )
    amounts = [params.presence_penalty, params.frequency_penalty]
    amounts += [amount for _, amount in params.logit_bias]
    if not (
        0 <= params.min_p <= 1
        and 0 < params.repetition_penalty < math.inf
        and all(map(math.isfinite, amounts))
    ):
        raise InvalidStateError(
            f"{params}: expected 0 <= min_p <= 1, repetition_penalty > 0, and finite presence and "
            "frequency penalties and logit biases"
        )
    if params.seed is not None and not 0 <= params.seed < 1 << 64:
        raise InvalidStateError(f"sampling seed {params.seed}: expected 0 <= seed < 2**64, or None")
    for token, _ in params.logit_bias:
        if vocab_size is not None and not 0 <= token < vocab_size:
            raise InvalidStateError(
                f"logit_bias names token {token}, expected an id below {vocab_size}"
            )


def is_plain(params: Sampling, rules: RowRules | None) -> bool:
    """Nothing but a temperature stands between logits and the distribution."""
    return (
        rules is None
        and not params.logit_bias
        and not params.top_k
        and params.top_p >= 1.0
        and params.min_p <= 0.0
    )


def has_penalties(params: Sampling) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def sample(
    logits: np.ndarray, uniforms: np.ndarray, params: Sequence[Sampling]
) -> tuple[np.ndarray, np.ndarray]:
    """logits float32 [N, V], uniforms float64 [N] -> (ids int32 [N], logprobs float32 [N])."""
    ids, logprobs, _ = draw(logits, uniforms, params, [None] * len(params))
    return ids, logprobs


def draw(
    logits: np.ndarray,
    uniforms: np.ndarray,
    params: Sequence[Sampling],
    rules: Sequence[RowRules | None],
) -> Drawn:
    """logits float32 [N, V], uniforms float64 [N], rules of each row.

    logprobs are those of the distribution really sampled: after everything in the module's order;
    greedy (temperature 0) has logprob 0, and alternatives as if its temperature were 1.
    """
    work = logits.astype(np.float64)
    for row, (p, rule) in enumerate(zip(params, rules, strict=True)):
        if rule is not None or p.logit_bias:
            _shape(work[row], p, rule or RowRules())
    temperature = np.array([p.temperature for p in params])
    greedy = temperature == 0
    # the maximum first: a tiny temperature sends all others to -inf, never two to +inf
    work -= work.max(axis=1, keepdims=True)
    best = work.argmax(axis=1) if greedy.any() else None
    with np.errstate(over="ignore"):
        work /= np.where(greedy, 1.0, temperature)[:, None]
    for row, p in enumerate(params):
        if p.top_k or p.top_p < 1.0 or p.min_p > 0.0:
            work[row] = _truncate(work[row], p)
    weights = np.exp(work)
    cumulative = weights.cumsum(axis=1)
    total = cumulative[:, -1]
    ids = (cumulative <= (uniforms * total)[:, None]).sum(axis=1)
    # the last token with weight, should rounding put the draw past the end
    ids = np.minimum(ids, weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1))
    logprobs = work[np.arange(len(ids)), ids] - np.log(total)
    if best is not None:
        ids = np.where(greedy, best, ids)
        logprobs = np.where(greedy, 0.0, logprobs)
    tops = [
        None if rule is None or not rule.num_logprobs else _top(work[i], total[i], rule)
        for i, rule in enumerate(rules)
    ]
    return Drawn(ids.astype(np.int32), logprobs.astype(np.float32), tops)


def _shape(row: np.ndarray, p: Sampling, rule: RowRules) -> None:
    """Penalties, bias and constraint, in place; row float64 [V]."""
    if rule.seen is not None and p.repetition_penalty != 1.0:
        seen = row[rule.seen]
        row[rule.seen] = np.where(
            seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty
        )
    if rule.counts is not None:
        row -= p.frequency_penalty * rule.counts
        row -= p.presence_penalty * (rule.counts > 0)
    for token, amount in p.logit_bias:
        row[token] += amount
    if rule.allowed is not None:
        assert rule.allowed.any(), "a constraint that allows no token must end the step before"
        row[~rule.allowed] = -np.inf


def _truncate(row: np.ndarray, p: Sampling) -> np.ndarray:
    """float64 [V] with -inf outside top-k and the smallest set whose mass reaches top-p, and below
    min_p times the largest probability (the largest entry is 0)."""
    order = np.argsort(-row, kind="stable")
    keep = np.zeros(len(row), bool)
    kept = order[: p.top_k] if p.top_k else order
    if p.top_p < 1.0:
        weights = np.exp(row[kept] - row[kept[0]])
        mass = weights.cumsum() / weights.sum()
        kept = kept[: int((mass < p.top_p).sum()) + 1]
    keep[kept] = True
    if p.min_p > 0.0:
        keep &= row >= math.log(p.min_p)
    return np.where(keep, row, -np.inf)


def _top(row: np.ndarray, total: float, rule: RowRules) -> Alternatives:
    k = rule.num_logprobs
    room = min(k, len(row))
    least = np.partition(row, len(row) - room)[len(row) - room]
    among = np.flatnonzero(row >= least)
    among = among[np.argsort(-row[among], kind="stable")][:room]
    among = among[np.isfinite(row[among])]
    ids = np.full(k, -1, np.int32)
    logprobs = np.full(k, -np.inf, np.float32)
    ids[: len(among)] = among
    logprobs[: len(among)] = row[among] - np.log(total)
    return Alternatives(ids, logprobs)
