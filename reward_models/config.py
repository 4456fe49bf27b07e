"""Knobs of staged rewards; formulas in facts/sft-rewards.md section 3."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config import ConfigModel


class GateConfig(ConfigModel):
    window: int = Field(256, ge=1)
    """Most recent scored episodes of a type that its accuracy is taken over (W)."""
    min_samples: int = Field(64, ge=1)
    """Below this many the gate keeps its state."""
    open_above: float = Field(0.85, ge=0, le=1)
    """Opens when accuracy minus one standard error exceeds this."""
    close_below: float = Field(0.80, ge=0, le=1)


class BudgetConfig(ConfigModel):
    rates: dict[str, float] = {"pdf_pages": 120.0, "code_lines": 80.0, "calls": 40.0}
    """Tokens a unit; a task whose units are all unknown has no budget."""
    minimum: float = Field(256.0, ge=0)
    cap: float = Field(131072.0, ge=1)
    over_budget: Literal["hard", "soft"] = "hard"
    """hard: a correct answer over budget is worth 0; soft: it loses value linearly."""
    soft_floor: float = Field(0.2, ge=0, le=1)
    phi_min: float = Field(0.3, ge=0, le=1)
    """Feasibility guard: enforced only if at least this share of recent correct episodes fit."""
    phi_window: int = Field(256, ge=1)
    phi_min_samples: int = Field(16, ge=1)


class EfficiencyConfig(ConfigModel):
    weight: float = Field(0.2, ge=0)
    """w of R = C (1 + w E)."""
    floor_factor: float = Field(1.3, ge=1)
    """No reward for fewer than floor_factor * m tokens."""
    floor_mode: Literal["none", "penalty", "tent"] = "none"
    floor_penalty: float = Field(0.2, ge=0, le=1)
    reference_window: int = Field(256, ge=1)
    """Correct episodes whose q90 of tokens is the reference length."""
    min_correct: int = Field(4, ge=1)
    """Correct episodes needed before m follows the data instead of the author."""
    max_refresh_drop: float = Field(0.1, ge=0, le=1)
    """m falls by at most this share when a stage begins anew."""


class ScheduleConfig(ConfigModel):
    kind: Literal["progressive", "stage0", "stage1"] = "progressive"
    """progressive: stage 1 once enough types are gated open; the others are fixed."""
    open_updates: int = Field(4, ge=1)
    """N consecutive updates with enough open types."""
    traffic_share: float = Field(0.8, ge=0, le=1)
    min_types: int = Field(2, ge=1)


class RewardConfig(ConfigModel):
    violation: float = Field(1.0, ge=0)
    """rho: a violation is worth minus this."""
    gate: GateConfig = GateConfig()
    budget: BudgetConfig = BudgetConfig()
    efficiency: EfficiencyConfig = EfficiencyConfig()
    schedule: ScheduleConfig = ScheduleConfig()
