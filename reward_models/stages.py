"""Staged rewards: budgets while a type is learnt (stage 0), efficiency once it is (stage 1).

R0 = -rho if violation, else C * [not open or T <= B]; R1 = -rho if violation, else C (1 + w E)
where the type's gate is open, C elsewhere. Wrong answers have no length term; repaired calls and
padding take a share of what is positive. Scoring is a pure function of (episode, its group, state);
the state is a pure fold over episodes in ledger order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reward_models import gate
from reward_models.abstain import gives_up, says_nothing
from reward_models.budget import feasible, size, token_budget, value_within
from reward_models.config import RewardConfig
from reward_models.efficiency import efficiency, minimum_tokens, quantile, refreshed_minimum
from reward_models.episode import UNSCORED, VIOLATIONS, Episode, Outcome, RewardBreakdown
from reward_models.state import RewardState, TypeState

FORMULA_VERSION = "staged-4"
Event = dict[str, Any]

__all__ = ["FORMULA_VERSION", "Event", "RewardModel", "RewardState"]


class RewardModel:
    """Composes gate, budget and efficiency; holds nothing but its config.

    Every correct answer is worth more than every wrong one (0), and that more than a violation
    (-rho). The one exception is the hard budget of stage 0, which makes an over-long correct answer
    worth as much as a wrong one.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def initial_state(self) -> RewardState:
        return RewardState(stage=1 if self.config.schedule.kind == "stage1" else 0)

    def budget(
        self,
        units: dict[str, float],
        task_type: str,
        state: RewardState,
        group: Sequence[Episode] = (),
    ) -> float | None:
        """Budget that is enforced now for such a task, or for ``group``; None = not enforced."""
        if state.stage != 0 or not state.is_open(task_type) or not self._is_easy(group):
            return None
        config, known = self.config.budget, state.of(task_type)
        if not known.guarded:
            return token_budget(units, config)
        if known.fallback is None or token_budget(units, config) is None:
            return None
        return min(max(known.fallback * (size(units, config) or 1.0), config.minimum), config.cap)

    def _is_easy(self, group: Sequence[Episode]) -> bool:
        """The second gate; a single episode, or a group nobody judged, does not hold it shut."""
        config = self.config.group_gate
        scored = [e for e in group if e.outcome not in UNSCORED]
        if not config.enabled or len(scored) < 2:
            return True
        return sum(map(self._correctness, scored)) >= config.share * len(scored)

    def gave_up(self, episode: Episode) -> bool:
        """It says that it has no answer where there is one. Saying nothing is that only where the
        verifier finds nothing right either."""
        if not self.config.giving_up.enabled or not episode.answerable:
            return False
        if episode.outcome in VIOLATIONS:
            return False
        text, ended = episode.final_text, episode.outcome == Outcome.COMPLETED
        return gives_up(text) or (ended and episode.correctness == 0 and says_nothing(text))

    def _correctness(self, episode: Episode) -> float:
        """C as reward and gate count it: before any budget effect, 0 for a violation or for giving
        up, whatever it reached."""
        if episode.outcome in VIOLATIONS or self.gave_up(episode):
            return 0.0
        assert episode.correctness is not None, f"{episode.episode_id}: scored without correctness"
        return episode.correctness

    # -- score ----------------------------------------------------------------------------------

    def score_all(self, episodes: Sequence[Episode], state: RewardState) -> list[RewardBreakdown]:
        """``score`` of each, with its group: those of ``episodes`` with its ``group_key``."""
        groups: dict[str, list[Episode]] = defaultdict(list)
        for episode in episodes:
            groups[episode.group_key].append(episode)
        return [self.score(e, state, groups[e.group_key] if e.group_key else ()) for e in episodes]

    def score(
        self, episode: Episode, state: RewardState, group: Sequence[Episode] = ()
    ) -> RewardBreakdown:
        """Parts sum to the total; UNSCORED outcomes have none. ``group``: all episodes of the same
        prompt in this round, this one included."""
        if episode.outcome in UNSCORED:
            return self._answer(None, {}, f"{episode.outcome}: infrastructure, no reward")
        if episode.outcome in VIOLATIONS:
            rho = self.config.violation
            return self._answer(-rho, {"violation": -rho}, f"violation: {episode.outcome}")
        correct = self._correctness(episode)
        parts = {"correct": correct}
        if correct == 0:
            why = "gave up" if self.gave_up(episode) and episode.correctness else "not correct"
            return self._answer(0.0, parts, f"{why} ({episode.outcome})")
        if state.stage == 0:
            answer = self._stage0(episode, correct, parts, state, group)
        else:
            answer = self._stage1(episode, correct, parts, state)
        return self._less(answer, episode)

    def _less(self, answer: RewardBreakdown, episode: Episode) -> RewardBreakdown:
        """R - R * share for R > 0, once for repaired calls and once for padding."""
        if not answer.total:
            return answer
        repairs, padding = self.config.repairs, self.config.padding
        shares = {
            "repairs": min(repairs.cap, repairs.cost * episode.num_repairs),
            "padding": padding.weight
            * max(0.0, episode.padding - padding.free)
            / (1 - padding.free),
        }
        words = {
            "repairs": f"{episode.num_repairs} repaired calls",
            "padding": f"{episode.padding:.0%} repeated tokens",
        }
        total, parts, reason = answer.total, dict(answer.parts), answer.reasons[0]
        for name, share in shares.items():
            if share:
                parts[name] = -total * share
                total = math.fsum(parts.values())
                reason += f"; {words[name]} cost {share:.0%}"
        return self._answer(total, parts, reason)

    def _stage0(
        self,
        episode: Episode,
        correct: float,
        parts: dict[str, float],
        state: RewardState,
        group: Sequence[Episode],
    ) -> RewardBreakdown:
        budget = self.budget(episode.budget_units, episode.task_type, state, group)
        if budget is None:
            return self._answer(correct, parts, "correct; no budget enforced")
        kept = value_within(episode.num_tokens, budget, self.config.budget)
        if kept == 1.0:
            return self._answer(correct, parts, f"correct within budget {budget:g}")
        parts["over_budget"] = -(correct - correct * kept)
        return self._answer(
            math.fsum(parts.values()),
            parts,
            f"correct, {episode.num_tokens} tokens over budget {budget:g}",
        )

    def _stage1(
        self, episode: Episode, correct: float, parts: dict[str, float], state: RewardState
    ) -> RewardBreakdown:
        if not state.in_force(episode.task_type):
            return self._answer(correct, parts, "correct; type not gated open")
        config = self.config.efficiency
        known = state.of(episode.task_type)
        minimum = minimum_tokens(episode.min_tokens, known.minimum, self._size(episode))
        if minimum is None or known.reference is None:
            return self._answer(correct, parts, "correct; no floor or reference length known yet")
        tokens, floor = episode.num_tokens, config.floor_factor * minimum
        gain = config.weight * efficiency(tokens, minimum, known.reference, config)
        parts["efficiency"] = correct * gain
        if config.floor_mode == "penalty" and tokens < floor:
            parts["below_floor"] = -correct * config.floor_penalty
        return self._answer(
            math.fsum(parts.values()),
            parts,
            f"correct, {tokens} tokens, floor {floor:g}, reference {known.reference:g}",
        )

    def _size(self, episode: Episode) -> float:
        """u(x): 1 for a task without known units, so that its rate is its length."""
        return size(episode.budget_units, self.config.budget) or 1.0

    def _answer(self, total: float | None, parts: dict[str, float], reason: str) -> RewardBreakdown:
        return RewardBreakdown(total, parts, (reason,), FORMULA_VERSION)

    # -- fold -----------------------------------------------------------------------------------

    def fold(
        self, state: RewardState, episodes: Sequence[Episode]
    ) -> tuple[RewardState, list[Event]]:
        """State after one update of ``episodes`` (in ledger order), and what changed.

        Only scored episodes count; an update without any changes nothing but its number.
        """
        events: list[Event] = []
        types = dict(state.types)
        scored = [e for e in episodes if e.outcome not in UNSCORED]
        traffic = Counter(e.task_type for e in scored)
        for name in sorted(traffic):
            rows = [e for e in scored if e.task_type == name]
            types[name] = self._fold_type(name, state.of(name), rows, events)
        after = replace(state, types=types, num_updates=state.num_updates + 1)
        after = self._switch(after, traffic, events)
        return self._freeze(state, after, events), events

    def _fold_type(
        self, name: str, before: TypeState, rows: Sequence[Episode], events: list[Event]
    ) -> TypeState:
        config = self.config
        opened = gate.update(before.gate, [self._correctness(e) for e in rows], config.gate)
        given_up = (*before.given_up, *(self.gave_up(e) for e in rows))[-config.gate.window :]
        rate = sum(given_up) / len(given_up)
        at_first = before.given_up_at_first
        if opened.open and at_first is None:
            at_first = rate
        if at_first is not None and rate > at_first + config.giving_up.max_rise:
            # brevity was bought by giving up: shut until that is over
            opened = replace(opened, open=False)
        if opened.open != before.gate.open:
            data = {
                "open": opened.open,
                "accuracy": opened.accuracy,
                "n": len(opened.recent),
                "given_up": rate,
            }
            events.append({"kind": "gate", "key": name, "data": data})
        correct = [e for e in rows if self._correctness(e) == 1.0]
        window = config.efficiency.reference_window
        lengths = (*before.correct_tokens, *(e.num_tokens for e in correct))[-window:]
        rates = (*before.correct_rates, *(e.num_tokens / self._size(e) for e in correct))[-window:]
        budgets = [(e.num_tokens, token_budget(e.budget_units, config.budget)) for e in correct]
        fits = (*before.fits, *(t <= b for t, b in budgets if b is not None))
        fits = fits[-config.budget.phi_window :]
        guarded = not feasible(fits, config.budget)
        fallback = before.fallback if guarded else None
        if guarded != before.guarded:
            if guarded and config.budget.infeasible == "percentile":
                fallback = quantile(rates, config.budget.percentile)
            data = {"on": guarded, "phi": sum(fits) / len(fits), "fallback": fallback}
            events.append({"kind": "budget_guard", "key": name, "data": data})
        return TypeState(
            gate=opened,
            correct_tokens=lengths,
            correct_rates=rates,
            fits=fits,
            minimum=before.minimum,
            reference=quantile(lengths, 0.90) if lengths else None,
            guarded=guarded,
            fallback=fallback,
            given_up=given_up,
            given_up_at_first=at_first,
        )

    def _switch(
        self, state: RewardState, traffic: Counter[str], events: list[Event]
    ) -> RewardState:
        """Choose the stage of the next update."""
        schedule = self.config.schedule
        total = traffic.total()
        open_types = sorted(name for name in traffic if state.is_open(name))
        share = sum(traffic[name] for name in open_types) / total if total else 0.0
        stage, streak = state.stage, state.open_streak
        if schedule.kind == "toggle":
            stage = (state.num_updates // schedule.toggle_every) % 2
        elif schedule.kind == "progressive" and total:
            enough = share >= schedule.traffic_share and len(open_types) >= schedule.min_types
            streak = streak + 1 if enough else 0
            if not enough:
                stage = 0
            elif streak >= schedule.open_updates:
                stage = 1
        if stage != state.stage:
            data = {"stage": stage, "open_types": open_types, "traffic_share": share}
            events.append({"kind": "stage", "key": "", "data": data})
        return replace(state, stage=stage, open_streak=streak)

    def _freeze(self, before: RewardState, after: RewardState, events: list[Event]) -> RewardState:
        """Measure each floor when it comes into force and then leave it: a floor that followed the
        policy down would reward ever shorter answers."""
        types = dict(after.types)
        for name, known in sorted(after.types.items()):
            if not after.in_force(name):
                continue
            if known.minimum is None or not before.in_force(name):
                rates, last = known.correct_rates, known.minimum
                minimum = refreshed_minimum(rates, last, self.config.efficiency)
                types[name] = replace(known, minimum=minimum)
            now, then = types[name], before.of(name)
            if (now.minimum, now.reference) != (then.minimum, then.reference):
                data = {"minimum": now.minimum, "reference": now.reference}
                events.append({"kind": "reference", "key": name, "data": data})
        return replace(after, types=types)
