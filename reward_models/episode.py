"""What a reward sees (Episode) and what it answers (RewardBreakdown). No tokens pass this door."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How an episode ended; exactly one per episode."""

    COMPLETED = "completed"
    AGENT_TIMEOUT = "agent_timeout"
    TOKEN_BUDGET = "token_budget"
    TURN_LIMIT = "turn_limit"
    LOOP = "loop"
    ILLEGAL_CALL = "illegal_call"
    PARSE_FAILURE = "parse_failure"
    ENV_ERROR = "env_error"
    VERIFIER_ERROR = "verifier_error"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"


VIOLATIONS = frozenset({Outcome.LOOP, Outcome.ILLEGAL_CALL, Outcome.PARSE_FAILURE})
"""The policy broke the rules: reward -rho, kept out of baselines."""

UNSCORED = frozenset(
    {Outcome.ENV_ERROR, Outcome.VERIFIER_ERROR, Outcome.INFRA_ERROR, Outcome.CANCELLED}
)
"""Nobody's fault but ours: reward None, never in a baseline, never 0."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode as counts, text and verdict.

    ``num_tokens`` T: tokens sampled by the policy (thinking, call arguments, answer; not prompt,
    not observations). ``correctness`` C in [0, 1], verified before any budget effect; None only
    for UNSCORED outcomes. ``budget_units``: e.g. {"calls": 3} or {"pdf_pages": 12}.
    """

    episode_id: str
    task_name: str
    task_type: str
    outcome: Outcome
    correctness: float | None
    num_tokens: int
    num_turns: int
    num_calls: int
    num_bad_calls: int = 0
    num_repairs: int = 0
    final_text: str = ""
    budget_units: dict[str, float] = field(default_factory=dict[str, float])
    min_tokens: int | None = None
    max_tokens: int | None = None
    group_key: str = ""
    padding: float = 0.0
    """Share of ``num_tokens`` that repeat a long run of the same turn."""
    answerable: bool = True
    """False where saying that there is no answer may be the answer."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """``total`` is None exactly when the outcome is UNSCORED; ``parts`` sum to ``total``."""

    total: float | None
    parts: dict[str, float]
    reasons: tuple[str, ...]
    formula_version: str
