"""One context inside LightEngine: its tokens, its blocks, what is still to be computed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.light.running import RunningStep
from engine.runtime.types import ContextId, ContextPolicy


@dataclass(frozen=True, slots=True)
class WaitingFork:
    """A fork that waits until its parent's prompt is computed."""

    child: ContextId
    policy: ContextPolicy | None
    future: Future[None]


@dataclass(frozen=True, slots=True)
class Report:
    """What a StepResult says of the positions from ``start`` on."""

    experts: np.ndarray
    selections: np.ndarray | None
    start: int
    warm_reads: int
    retrieved: int
    codes: np.ndarray | None
    codes_start: int


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
    selections: np.ndarray | None = None
    """int32 [capacity, layers, G, P | 1, K]: far tokens by position; None in full attention."""
    codes: dict[int, np.ndarray] | None = None
    """uint8 [code_bytes] of each block that has turned warm, shared with forks; None: not kept."""
    code_bytes: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    """Logical block -> physical block; full attention only."""
    shares_tail: bool = False
    """Hybrid attention: the block written next may belong to a fork too."""
    turn: int | None = None
    """Hybrid attention with a cold router: first token that came in since the last turn was routed;
    None: none did."""
    pause: int | None = None
    """Position that no row may reach before something else was done, see engine.light.turn_starts.
    """
    replayed: int = 0
    """Moves between tiers on record that have been made since its KV was last dropped."""
    warm_reads: int = 0
    retrieved: int = 0
    """Since the last report, see StepResult."""
    reported: int = 0
    reported_blocks: int = 1
    """Codes of the blocks before it were reported; block 0, the sink, has none."""
    served: int = 0
    """Number of the batch this context last had rows in; the longest waiting goes first."""
    began: int = 0
    """Order in which steps began; when blocks run short, the last one gives way."""
    stepped: bool = False
    """A step began since the context was opened or last evicted from."""
    sampled: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of ``tokens`` that its own steps sampled."""
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
        if self.pause is not None and self.todo:
            available = min(available, self.pause - self.todo[0])
        return self.todo[: min(limit, available)]

    def rewind(self, length: int) -> None:
        """Forget the tokens from ``length`` on; the last one left must be fed again."""
        del self.tokens[length:]
        self.todo = [p for p in self.todo if p < length - 1] + [length - 1]

    def record(
        self, positions: list[int], experts: np.ndarray, selections: np.ndarray | None = None
    ) -> None:
        """Keep the routing int16 [n, L, K] of computed positions, and what they selected."""
        end = positions[-1] + 1
        # without a gap, as nearly always: a slice costs a fraction of an index list
        is_run = end - positions[0] == len(positions)
        where = slice(positions[0], end) if is_run else positions
        self.experts = _grown(self.experts, end, 0)
        self.experts[where] = experts
        if selections is not None and self.selections is not None:
            self.selections = _grown(self.selections, end, -1)
            self.selections[where] = selections

    def take_report(self) -> Report:
        """Routing and selections of computed positions not told yet, and where they start."""
        end = self.todo[0] if self.todo else len(self.tokens)
        start = self.reported
        self.reported = max(self.reported, end)
        selections = self.selections
        report = Report(
            self.experts[start : self.reported].copy(),
            None if selections is None else selections[start : self.reported].copy(),
            start,
            self.warm_reads,
            self.retrieved,
            *self._take_codes(),
        )
        self.warm_reads = self.retrieved = 0
        return report

    def _take_codes(self) -> tuple[np.ndarray | None, int]:
        start = self.reported_blocks
        if self.codes is None:
            return None, start
        fresh: list[np.ndarray] = []
        while (codes := self.codes.get(self.reported_blocks)) is not None:
            fresh.append(codes)
            self.reported_blocks += 1
        return np.array(fresh, np.uint8).reshape(len(fresh), self.code_bytes), start


def _grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    """``array`` with at least ``size`` entries."""
    if size <= len(array):
        return array
    grown = np.full((max(2 * len(array), size), *array.shape[1:]), fill, array.dtype)
    grown[: len(array)] = array
    return grown
