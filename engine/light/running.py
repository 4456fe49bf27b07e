"""A forward_step in progress: what was asked, what was sampled so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.constrain.guide import Guide
from engine.light.debug import DebugTally
from engine.light.sampler import Alternatives, RowRules
from engine.light.stop_texts import StopTexts
from engine.runtime.types import StepDelta, StepRequest, StepResult

Listener = Callable[[StepDelta], None]


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
    rules: RowRules | None = None
    """What shapes its logits besides ``request.sampling``."""
    tops: list[Alternatives] = field(default_factory=list)
    guide: Guide | None = None
    masks: list[np.ndarray] = field(default_factory=list)
    stops: StopTexts | None = None
    stop_text: str | None = None
    deadline: float = math.inf
    """Of time.monotonic."""
    listener: Listener | None = None
    """Is told every token, on the engine's thread; must not block."""
    debug: DebugTally | None = None
    """Where its time goes, when the request asks."""
