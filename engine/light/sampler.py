"""Inverse-CDF sampling in float64, one row at a time in meaning, vectorised in practice.

A row's token depends on its logits and its uniform draw alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.errors import InvalidStateError
from engine.runtime.types import Sampling


def check_sampling(params: Sampling) -> None:
    """InvalidStateError for a setting that names no distribution."""
    # written so that NaN fails
    if not (0 <= params.temperature < math.inf and 0 < params.top_p <= 1 and params.top_k >= 0):
        raise InvalidStateError(
            f"{params}: expected temperature >= 0 and finite, 0 < top_p <= 1, top_k >= 0 (0 = all "
            "tokens)"
        )


def sample(
    logits: np.ndarray, uniforms: np.ndarray, params: Sequence[Sampling]
) -> tuple[np.ndarray, np.ndarray]:
    """logits float32 [N, V], uniforms float64 [N] -> (ids int32 [N], logprobs float32 [N]).

    logprobs are those of the distribution really sampled: after temperature, top-k and top-p;
    greedy (temperature 0) has logprob 0.
    """
    work = logits.astype(np.float64)
    temperature = np.array([p.temperature for p in params])
    greedy = temperature == 0
    # the maximum first: a tiny temperature sends all others to -inf, never two to +inf
    work -= work.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        work /= np.where(greedy, 1.0, temperature)[:, None]
    for row, p in enumerate(params):
        if p.top_k or p.top_p < 1.0:
            work[row] = _truncate(work[row], p)
    weights = np.exp(work)
    cumulative = weights.cumsum(axis=1)
    total = cumulative[:, -1]
    ids = (cumulative <= (uniforms * total)[:, None]).sum(axis=1)
    # the last token with weight, should rounding put the draw past the end
    ids = np.minimum(ids, weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1))
    logprobs = work[np.arange(len(ids)), ids] - np.log(total)
    if greedy.any():
        ids = np.where(greedy, logits.argmax(axis=1), ids)
        logprobs = np.where(greedy, 0.0, logprobs)
    return ids.astype(np.int32), logprobs.astype(np.float32)


def _truncate(row: np.ndarray, p: Sampling) -> np.ndarray:
    """float64 [V] with -inf outside top-k and the smallest set whose mass reaches top-p."""
    order = np.argsort(-row, kind="stable")
    keep = np.zeros(len(row), bool)
    kept = order[: p.top_k] if p.top_k else order
    if p.top_p < 1.0:
        weights = np.exp(row[kept] - row[kept[0]])
        mass = weights.cumsum() / weights.sum()
        kept = kept[: int((mass < p.top_p).sum()) + 1]
    keep[kept] = True
    return np.where(keep, row, -np.inf)
