"""How the rows of a batch write and read the KV cache: what scheduler, runner and tables share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.light.context import Context

Plan = list[tuple[Context, list[int]]]
"""Contexts with the positions to compute in one batch."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What the rows of a hybrid batch read. selections int32 [N, layers, G, P | 1, K], far tokens,
    -1 fills; warm, retrieved int64 [N]: coded tokens in view and far tokens read, in one layer;
    failed bool [N], true for contexts with a block that no code stands for; codes: of the plan's
    n-th context, by block, what turned warm (engine.kvcache.payload)."""

    selections: np.ndarray
    warm: np.ndarray
    retrieved: np.ndarray
    failed: np.ndarray
    codes: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)


class CacheRows(Protocol):
    """The N rows of one batch, in the order of the plan; used once."""

    order: np.ndarray
    """int64 [N]: the order in which ``attend`` wants them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k [M, G, D], v [M, G, V] and read with q [M, A, D] -> [M, A, V]; the first N of the
        M rows are those of the batch, the others fill up a multiple of 32."""
        ...

    def finish(self) -> Reads | None:
        """After the last layer; None when every row reads all its context."""
        ...
