"""Knobs of staged rewards; formulas in facts/sft-rewards.md section 3."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config import ConfigModel


class GateConfig(ConfigModel):
    window: int = Field(default=256, ge=1)
    """Most recent scored episodes of a type that its accuracy is taken over (W)."""
    min_samples: int = Field(default=64, ge=1)
    """Below this many the gate keeps its state."""
    open_above: float = Field(default=0.85, ge=0, le=1)
    """Opens when accuracy minus one standard error exceeds this."""
    close_below: float = Field(default=0.80, ge=0, le=1)


class BudgetConfig(ConfigModel):
    rates: dict[str, float] = Field(
        default_factory=lambda: {"pdf_pages": 120.0, "code_lines": 80.0, "calls": 40.0}
    )
    """Tokens a unit; a task whose units are all unknown has no budget."""
    minimum: float = Field(default=256.0, ge=0)
    cap: float = Field(default=131072.0, ge=1)
    over_budget: Literal["hard", "soft"] = "hard"
    """hard: a correct answer over budget is worth 0; soft: it loses value linearly."""
    soft_floor: float = Field(default=0.2, gt=0, le=1)
    """Least share of its value a correct answer keeps, however long; positive, so that correct
    stays above wrong."""
    phi_min: float = Field(default=0.3, ge=0, le=1)
    """Feasibility guard: enforced only if at least this share of recent correct episodes fit."""
    phi_window: int = Field(default=256, ge=1)
    phi_min_samples: int = Field(default=16, ge=1)
    infeasible: Literal["suspend", "percentile"] = "suspend"
    """What the guard puts in place of a budget hardly anyone meets: none, or the length that
    ``percentile`` of the correct episodes kept when it stepped in (Toggle's budget)."""
    percentile: float = Field(default=0.5, gt=0, le=1)


class EfficiencyConfig(ConfigModel):
    weight: float = Field(default=0.2, ge=0)
    """w of R = C (1 + w E)."""
    floor_factor: float = Field(default=1.3, ge=1)
    """No reward for fewer than floor_factor * m tokens."""
    floor_mode: Literal["none", "penalty", "tent"] = "none"
    floor_penalty: float = Field(default=0.2, ge=0, lt=1)
    """w_f of C (1 - w_f) below the floor; under 1, so that correct stays above wrong."""
    reference_window: int = Field(default=256, ge=1)
    """Correct episodes whose q90 of tokens is the reference length."""
    min_correct: int = Field(default=4, ge=1)
    """Correct episodes needed before m follows the data beside the author's estimate."""
    max_refresh_drop: float = Field(default=0.1, ge=0, le=1)
    """m falls by at most this share each time it comes into force anew."""


class ScheduleConfig(ConfigModel):
    kind: Literal["progressive", "toggle", "stage0", "stage1"] = "progressive"
    """progressive: stage 1 once enough types are gated open, back when they close; toggle:
    alternate every ``toggle_every`` updates (K2.5; guards against over-fitting lengths); the
    others are fixed."""
    toggle_every: int = Field(default=10, ge=1)
    """m of toggle: updates a phase lasts; even phases are stage 0."""
    open_updates: int = Field(default=4, ge=1)
    """N consecutive updates with enough open types."""
    traffic_share: float = Field(default=0.8, ge=0, le=1)
    min_types: int = Field(default=2, ge=1)


class RepairConfig(ConfigModel):
    """A call the sandbox had to repair costs a little: with free repair a policy never unlearns its
    typos (facts/rl-platforms.md 5)."""

    cost: float = Field(default=0.02, ge=0, lt=1)
    """Share of an episode's positive reward that one repair takes."""
    cap: float = Field(default=0.2, ge=0, lt=1)
    """Most that all repairs take; under 1, so that correct stays above wrong."""


class GroupGateConfig(ConfigModel):
    """A second gate, for one prompt: a hard item of an easy type stays without a budget (K2.5's
    Toggle, c / K >= lambda)."""

    enabled: bool = True
    share: float = Field(default=0.8, ge=0, le=1)
    """lambda: least share of the group's scored episodes that must be correct."""


class GivingUpConfig(ConfigModel):
    """An answer that is none counts as wrong, whatever a lenient verifier says of it."""

    enabled: bool = True
    max_rise: float = Field(default=0.05, ge=0, le=1)
    """A type's gate closes when its rate of giving up is this much above the rate at which it
    first opened."""


class PaddingConfig(ConfigModel):
    """Tokens that repeat what the same turn said before."""

    free: float = Field(default=0.2, ge=0, lt=1)
    """Share of an episode's tokens that may repeat at no cost."""
    weight: float = Field(default=0.2, ge=0, lt=1)
    """Share of a positive reward that an episode of nothing but repetition loses; under 1, so that
    correct stays above wrong."""


class RewardConfig(ConfigModel):
    violation: float = Field(default=1.0, gt=0)
    """rho: a violation is worth minus this."""
    gate: GateConfig = GateConfig()
    budget: BudgetConfig = BudgetConfig()
    efficiency: EfficiencyConfig = EfficiencyConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    repairs: RepairConfig = RepairConfig()
    group_gate: GroupGateConfig = GroupGateConfig()
    giving_up: GivingUpConfig = GivingUpConfig()
    padding: PaddingConfig = PaddingConfig()
