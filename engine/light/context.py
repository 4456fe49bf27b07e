"""One context inside LightEngine: its tokens, its blocks, what is still to be computed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.runtime.types import ContextId, ContextPolicy, StepRequest, StepResult


@dataclass(slots=True)
class RunningStep:
    """A forward_step in progress."""

    request: StepRequest
    future: Future[StepResult]
    start: int
    stop_ids: frozenset[int]
    epoch: int
    """Weight swaps before this step: it runs when that many have been applied."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WaitingFork:
    """A fork that waits until its parent's prompt is computed."""

    child: ContextId
    policy: ContextPolicy | None
    future: Future[None]


@dataclass(slots=True)
class Context:
    """``todo``: positions whose KV is missing, ascending; the last token's is always missing when
    a step begins, because it was sampled or appended and not fed yet."""

    id: ContextId
    policy: ContextPolicy
    slot: int
    tokens: list[int]
    todo: list[int]
    experts: np.ndarray
    """int16 [capacity, L, K]: routed experts by position; ``record`` makes it grow."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Logical block -> physical block."""
    reported: int = 0
    served: int = 0
    """Number of the batch this context last had rows in; the longest waiting goes first."""
    began: int = 0
    """Order in which steps began; when blocks run short, the last one gives way."""
    step: RunningStep | None = None
    forks: list[WaitingFork] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return self.step is None and not self.forks

    @property
    def num_prefill(self) -> int:
        """Positions to compute before the last token's."""
        return len(self.todo) - (1 if self.todo and self.todo[-1] == len(self.tokens) - 1 else 0)

    def next_rows(self, limit: int) -> list[int]:
        """Positions to compute next; a context that only prefills for a fork leaves the last."""
        available = len(self.todo) if self.step is not None else self.num_prefill
        return self.todo[: min(limit, available)]

    def rewind(self, length: int) -> None:
        """Forget the tokens from ``length`` on; the last one left must be fed again."""
        del self.tokens[length:]
        self.todo = [p for p in self.todo if p < length - 1] + [length - 1]

    def record(self, positions: list[int], experts: np.ndarray) -> None:
        """Keep the routing int16 [n, L, K] of computed positions."""
        if positions[-1] >= len(self.experts):
            capacity = max(2 * len(self.experts), positions[-1] + 1)
            grown = np.zeros((capacity, *self.experts.shape[1:]), np.int16)
            grown[: len(self.experts)] = self.experts
            self.experts = grown
        if positions[-1] - positions[0] == len(positions) - 1:
            # without a gap, as nearly always: a slice costs a fraction of an index list
            self.experts[positions[0] : positions[-1] + 1] = experts
        else:
            self.experts[positions] = experts

    def take_experts(self) -> tuple[np.ndarray, int]:
        """Routing of computed positions not told yet, and where it starts."""
        end = self.todo[0] if self.todo else len(self.tokens)
        start = self.reported
        self.reported = max(self.reported, end)
        return self.experts[start : self.reported].copy(), start
