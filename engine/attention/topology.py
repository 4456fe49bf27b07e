"""Which positions a query sees and which of them are warm: pure functions of position and step.

t is a query's context length, its position + 1. Blocks have 32 tokens; block 0 is the sink and
stays in full precision for ever (engine.kvcache.tiers.is_warm). The engine and the learner both
ask here, so that they agree
(facts/kv-attention.md 3, "Train = infer").

    0        32              warm_end(t)      window_start(t)       t
    | sink   | warm, far     | hot, far       | window              |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kvcache.quantise import BLOCK

SINK = BLOCK
"""Tokens of the sink block."""


def warm_end(t: int, hot: int) -> int:
    """First position after the sink that is not warm; positions [32, warm_end) are."""
    return max(SINK, BLOCK * ((t - hot) // BLOCK))


def warm_start(end: int, warm: int | None) -> int:
    """First warm position where warm tokens end at ``end``: only the last ``warm`` of them (whole
    blocks) are kept on the device, the others are cold and not seen. None keeps all."""
    return SINK if warm is None else max(SINK, end - warm // BLOCK * BLOCK)


def window_start(t: int, window: int) -> int:
    """The window is [window_start, t), empty in contexts no longer than the sink."""
    return max(SINK, t - window)


def is_dense(t: int, dense_below: int) -> bool:
    return t <= dense_below


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring queries of context lengths first .. last with the same warm blocks."""

    first: int
    last: int
    warm_end: int
    dense: bool


def chunks(start: int, stop: int, hot: int, dense_below: int) -> Iterator[Chunk]:
    """Queries at positions start .. stop - 1, in runs of at most 32 that share warm blocks and
    are all dense or all sparse."""
    first = start + 1
    while first <= stop:
        last = min(stop, first + BLOCK - 1 - (first - hot) % BLOCK)
        if first <= dense_below:
            last = min(last, dense_below)
        yield Chunk(first, last, warm_end(first, hot), is_dense(first, dense_below))
        first = last + 1


def warm_mask(lengths: Tensor, num_positions: int, hot: int) -> Tensor:
    """lengths int64 [n] -> bool [n, num_positions], true where the query reads codes."""
    ends = torch.div(lengths - hot, BLOCK, rounding_mode="floor") * BLOCK
    positions = torch.arange(num_positions)
    return (positions >= SINK) & (positions < ends[:, None])


def near_mask(lengths: Tensor, num_positions: int, window: int) -> Tensor:
    """Sink and window: bool [n, num_positions]."""
    positions = torch.arange(num_positions)
    start = (lengths - window).clamp(min=SINK)[:, None]
    return causal_mask(lengths, num_positions) & ((positions < SINK) | (positions >= start))


def far_mask(lengths: Tensor, num_positions: int, window: int) -> Tensor:
    """What retrieval chooses from: bool [n, num_positions]."""
    positions = torch.arange(num_positions)
    return (positions >= SINK) & (positions < (lengths - window)[:, None])


def causal_mask(lengths: Tensor, num_positions: int) -> Tensor:
    return torch.arange(num_positions) < lengths[:, None]
