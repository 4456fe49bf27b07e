"""Staged rewards: budgets while a type is learnt (stage 0), efficiency once it is (stage 1).

R0 = -rho if violation, else C * [not open or T <= B]; R1 = -rho if violation, else C (1 + w E)
where the type's gate is open, C elsewhere. Wrong answers have no length term. Scoring is a pure
function of (episode, state); the state is a pure fold over episodes in ledger order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reward_models import gate
from reward_models.budget import feasible, token_budget, value_within
from reward_models.config import RewardConfig
from reward_models.efficiency import efficiency, minimum_tokens, quantile
from reward_models.episode import UNSCORED, VIOLATIONS, Episode, RewardBreakdown
from reward_models.state import RewardState, TypeState

FORMULA_VERSION = "staged-1"
Event = dict[str, Any]

__all__ = ["FORMULA_VERSION", "Event", "RewardModel", "RewardState"]


class RewardModel:
    """Composes gate, budget and efficiency; holds nothing but its config."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def initial_state(self) -> RewardState:
        return RewardState(stage=1 if self.config.schedule.kind == "stage1" else 0)

    def budget(self, units: dict[str, float], task_type: str, state: RewardState) -> float | None:
        """Budget that is enforced now for such a task; None = not enforced."""
        if state.stage != 0 or not state.is_open(task_type) or state.of(task_type).guarded:
            return None
        return token_budget(units, self.config.budget)

    # -- score ----------------------------------------------------------------------------------

    def score(self, episode: Episode, state: RewardState) -> RewardBreakdown:
        """Parts sum to the total; UNSCORED outcomes have none."""
        if episode.outcome in UNSCORED:
            return self._answer(None, {}, f"{episode.outcome}: infrastructure, no reward")
        if episode.outcome in VIOLATIONS:
            rho = self.config.violation
            return self._answer(-rho, {"violation": -rho}, f"violation: {episode.outcome}")
        assert episode.correctness is not None, f"{episode.episode_id}: scored without correctness"
        correct = episode.correctness
        parts = {"correct": correct}
        if correct == 0:
            return self._answer(0.0, parts, f"not correct ({episode.outcome})")
        if state.stage == 0:
            return self._stage0(episode, correct, parts, state)
        return self._stage1(episode, correct, parts, state)

    def _stage0(
        self, episode: Episode, correct: float, parts: dict[str, float], state: RewardState
    ) -> RewardBreakdown:
        budget = self.budget(episode.budget_units, episode.task_type, state)
        if budget is None:
            return self._answer(correct, parts, "correct; no budget enforced")
        kept = value_within(episode.num_tokens, budget, self.config.budget)
        if kept == 1.0:
            return self._answer(correct, parts, f"correct within budget {budget:g}")
        parts["over_budget"] = -(correct - correct * kept)
        return self._answer(
            sum(parts.values()),
            parts,
            f"correct, {episode.num_tokens} tokens over budget {budget:g}",
        )

    def _stage1(
        self, episode: Episode, correct: float, parts: dict[str, float], state: RewardState
    ) -> RewardBreakdown:
        known = state.of(episode.task_type)
        if not state.is_open(episode.task_type) or known.minimum is None or known.reference is None:
            return self._answer(correct, parts, "correct; type not gated open")
        config = self.config.efficiency
        tokens = episode.num_tokens
        parts["efficiency"] = (
            correct * config.weight * efficiency(tokens, known.minimum, known.reference, config)
        )
        reason = f"correct, {tokens} tokens, floor {config.floor_factor * known.minimum:g}"
        if config.floor_mode == "penalty" and tokens < config.floor_factor * known.minimum:
            parts["below_floor"] = -correct * config.floor_penalty
        return self._answer(sum(parts.values()), parts, reason)

    def _answer(self, total: float | None, parts: dict[str, float], reason: str) -> RewardBreakdown:
        return RewardBreakdown(total, parts, (reason,), FORMULA_VERSION)

    # -- fold -----------------------------------------------------------------------------------

    def fold(
        self, state: RewardState, episodes: Sequence[Episode]
    ) -> tuple[RewardState, list[Event]]:
        """State after one update of ``episodes`` (in ledger order), and what changed."""
        events: list[Event] = []
        types = dict(state.types)
        scored = [e for e in episodes if e.outcome not in UNSCORED]
        for name in sorted({e.task_type for e in scored}):
            rows = [e for e in scored if e.task_type == name]
            types[name] = self._fold_type(name, state.of(name), rows, events)
        after = replace(state, types=types)
        traffic = {name: sum(e.task_type == name for e in scored) for name in types}
        return self._switch(after, traffic, events)

    def _fold_type(
        self, name: str, before: TypeState, rows: Sequence[Episode], events: list[Event]
    ) -> TypeState:
        config = self.config
        opened = gate.update(before.gate, [e.correctness or 0.0 for e in rows], config.gate)
        if opened.open != before.gate.open:
            data = {"open": opened.open, "accuracy": opened.accuracy, "n": len(opened.recent)}
            events.append({"kind": "gate", "key": name, "data": data})
        correct = [e for e in rows if e.correctness == 1.0]
        lengths = (*before.correct_tokens, *(e.num_tokens for e in correct))
        lengths = lengths[-config.efficiency.reference_window :]
        budgets = [(e.num_tokens, token_budget(e.budget_units, config.budget)) for e in correct]
        fits = (*before.fits, *(t <= b for t, b in budgets if b is not None))
        fits = fits[-config.budget.phi_window :]
        guarded = not feasible(fits, config.budget)
        if guarded != before.guarded:
            share = sum(fits) / len(fits)
            events.append(
                {"kind": "budget_guard", "key": name, "data": {"on": guarded, "phi": share}}
            )
        authors = [e.min_tokens for e in rows if e.min_tokens is not None]
        minimum = before.minimum
        if minimum is None or opened.open != before.gate.open:
            # frozen while the gate holds its state, or the floor would chase the policy
            fresh = minimum_tokens(max(authors) if authors else None, lengths, config.efficiency)
            if fresh is not None and minimum is not None:
                fresh = max(fresh, minimum * (1 - config.efficiency.max_refresh_drop))
            minimum = fresh if fresh is not None else minimum
        reference = quantile(lengths, 0.90) if lengths else before.reference
        if opened.open and before.gate.open and before.reference is not None:
            reference = before.reference
        if (minimum, reference) != (before.minimum, before.reference) and opened.open:
            data = {"minimum": minimum, "reference": reference}
            events.append({"kind": "reference", "key": name, "data": data})
        return TypeState(opened, lengths, fits, minimum, reference, guarded)

    def _switch(
        self, state: RewardState, traffic: dict[str, int], events: list[Event]
    ) -> tuple[RewardState, list[Event]]:
        schedule = self.config.schedule
        if schedule.kind != "progressive":
            return state, events
        open_types = [name for name in traffic if state.is_open(name)]
        total = sum(traffic.values())
        share = sum(traffic[name] for name in open_types) / total if total else 0.0
        enough = share >= schedule.traffic_share and len(open_types) >= schedule.min_types
        streak = state.open_streak + 1 if enough else 0
        stage = state.stage
        if stage == 0 and streak >= schedule.open_updates:
            stage = 1
        elif stage == 1 and not enough:
            stage = 0
        if stage != state.stage:
            data = {"stage": stage, "open_types": open_types, "traffic_share": share}
            events.append({"kind": "stage", "key": "", "data": data})
        return replace(state, stage=stage, open_streak=streak), events
