"""What a round and an evaluation say about themselves, and who listens: plain values, one protocol.

Rates lie in [0, 1], token counts are policy tokens per episode (T(y) of the reward), times are
seconds. A type nobody has solved has no tokens per solved task: None, never a made-up number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One committed RL round."""

    index: int
    """0-based; ``index + 1`` of ``num_rounds`` are done."""
    num_rounds: int
    phase: str
    """"train" as in the ledger."""
    success: dict[str, float]
    """Share of scored episodes that are correct, by task type."""
    mean_tokens: dict[str, float]
    tokens_per_solved: dict[str, float | None]
    """All tokens of the type over its solved episodes; None when none is solved."""
    gate_open: dict[str, bool]
    """Whether the budget is enforced for the type (hysteresis gate, stage 0)."""
    stage: int
    """0 = budgets, 1 = efficiency reward."""
    reward_mean: float
    metrics: dict[str, float] = field(default_factory=dict)
    """loss, grad_norm, max_abs_dlogp, mean_abs_dlogp, expert_flip_share, mismatch_kl, entropy..."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Episodes by outcome name."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by step of the round (collect, score, update, commit, total...)."""
    weight_version: int = 0
    """Version published by this round."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One held-out evaluation."""

    name: str
    """"before", "after"; the ledger's phase is ``eval:<name>``."""
    episodes: int
    success: float
    """Mean over all scored episodes."""
    success_by_type: dict[str, float]
    mean_tokens: float
    mean_tokens_by_type: dict[str, float]
    tokens_per_solved: float | None
    outcomes: dict[str, int] = field(default_factory=dict)
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished experiment hands to whoever watched it."""

    run_id: str
    run_dir: str
    before: EvalReport | None
    after: EvalReport | None
    num_rounds: int
    rounds_here: int
    """Rounds of this process: a resumed run has more."""
    seconds: float
    """Wall time of this process, from the first phase on."""


class Progress(Protocol):
    """Somebody who watches an experiment. Called from the driver's thread, must not block.

    parl.report.progress has the implementations; the rounds know only this.
    """

    def phase_started(self, name: str) -> None:
        """``name``: "warm start", "eval before", "rounds", "eval after"..."""
        ...

    def warm_step(self, done: int, total: int, loss: float) -> None:
        """One supervised step; ``loss`` in nats per token."""
        ...

    def round_done(self, report: RoundReport) -> None: ...

    def eval_done(self, report: EvalReport) -> None: ...

    def finished(self, summary: RunSummary) -> None: ...
