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
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cancelled: bool = False


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
    """int16 [capacity, L, K]: routed experts by position."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Logical block -> physical block."""
    reported: int = 0
    step: RunningStep | None = None
    forks: list[Future[None]] = field(default_factory=list)
    """Wait for everything but the last token to be computed."""

    @property
    def wants_rows(self) -> bool:
        if self.step is not None:
            return True
        return bool(self.forks) and self.num_prefill > 0

    @property
    def num_prefill(self) -> int:
        """Positions to compute before the last token's."""
        return len(self.todo) - (1 if self.todo and self.todo[-1] == len(self.tokens) - 1 else 0)

    def next_rows(self, limit: int) -> list[int]:
        """Positions to compute next; a context that only prefills for a fork leaves the last."""
        available = len(self.todo) if self.step is not None else self.num_prefill
        return self.todo[: min(limit, available)]

    def take_experts(self, end: int) -> tuple[np.ndarray, int]:
        """Routing of positions [reported, end) not told yet, and where it starts."""
        start = self.reported
        self.reported = max(self.reported, end)
        return self.experts[start:end].copy(), start
