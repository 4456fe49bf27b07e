"""Token budgets from what a task says about its size, and whether they are fair to enforce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reward_models.config import BudgetConfig


def size(units: Mapping[str, float], config: BudgetConfig) -> float | None:
    """sum rate * units over known units, in tokens; None when no unit is known."""
    known = [config.rates[name] * value for name, value in units.items() if name in config.rates]
    return sum(known) if known else None


def token_budget(units: Mapping[str, float], config: BudgetConfig) -> float | None:
    """B = clip(size, minimum, cap); None (no budget) when no unit is known."""
    tokens = size(units, config)
    return None if tokens is None else min(max(tokens, config.minimum), config.cap)


def feasible(fits: Sequence[bool], config: BudgetConfig) -> bool:
    """phi >= phi_min over recent correct episodes; with too few of them nothing speaks against.

    At phi = 0.05 two thirds of groups of 8 are entirely over budget and give no gradient.
    """
    if len(fits) < config.phi_min_samples:
        return True
    return sum(fits) / len(fits) >= config.phi_min


def value_within(tokens: int, budget: float, config: BudgetConfig) -> float:
    """What a fully correct answer of ``tokens`` keeps of its value, in [0, 1]."""
    if tokens <= budget:
        return 1.0
    if config.over_budget == "hard":
        return 0.0
    if budget <= 0:
        return config.soft_floor
    return max(config.soft_floor, 1.0 - 0.5 * (tokens - budget) / budget)
