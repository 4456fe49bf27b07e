"""Times, sizes and tokens of the oracle: what limits a task should declare."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from sandbox.check.episodes import Played
from sandbox.check.findings import Step
from sandbox.check.reads import decoded_calls
from sandbox.check.scripts import Script
from sandbox.check.subject import Case

CountTokens = Callable[[Script], int]
"""Sampled tokens of a script: its calls and its answer as a policy would write them."""

HEADROOM = 10.0
"""Suggested limits over what was measured: machines differ and are shared."""
TIGHT = 0.5
_CUT = re.compile(r"\n\[cut: (\d+) bytes\]\Z")
"""What sandbox.toolkit.clip ends with."""


def utf8_tokens(script: Script) -> int:
    """Bytes as tokens, with four markers a call and two a turn: an upper estimate for any BPE."""
    count = len(script.final_text.encode()) + 1
    for calls in script.rounds:
        count += 2 + 1
        for call in calls:
            count += 4 + len(call.name_text.encode()) + len(call.arguments_text.encode())
    return count


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def check_timing(
    cases: Sequence[Case], runs: Sequence[tuple[Case, Played]], count_tokens: CountTokens
) -> tuple[Step, dict[str, Any]]:
    """The step and the suggested values. ``runs``: the oracle's episodes."""
    step = Step("timing")
    calls = [seen.elapsed_s for _, played in runs for seen in played.observations]
    episodes = [played.elapsed_s for _, played in runs]
    sizes = [len(seen.text.encode()) for _, played in runs for seen in played.observations]
    tokens = {id(case): count_tokens(case.oracle) for case in cases}
    by_type: dict[str, int] = {}
    for case in cases:
        kind = case.spec.task_type
        by_type[kind] = min(by_type.get(kind, tokens[id(case)]), tokens[id(case)])
        _declared(case, tokens[id(case)], step)
    limits = cases[0].spec.limits
    call_p95, episode_p95 = percentile(calls, 0.95), percentile(episodes, 0.95)
    if call_p95 > TIGHT * limits.call_timeout_s:
        step.add(
            "tight-timeout",
            "task.toml: metadata.parl.budget.call_timeout_s",
            f"the oracle's calls take {call_p95:.2f} s (p95) of {limits.call_timeout_s:g} s; on a "
            "busy machine they will miss it",
        )
    if episode_p95 > TIGHT * limits.timeout_s:
        step.add(
            "tight-timeout",
            "task.toml: agent.timeout_sec",
            f"the oracle alone takes {episode_p95:.2f} s (p95) of {limits.timeout_s:g} s",
        )
    _cut(runs, limits.max_output_bytes, step)
    step.data = {
        "call_s": {"p50": percentile(calls, 0.5), "p95": call_p95, "max": max(calls, default=0.0)},
        "episode_s": {"p50": percentile(episodes, 0.5), "p95": episode_p95},
        "output_bytes_max": max(sizes, default=0),
        "oracle_tokens": by_type,
        "oracle_calls": {case.spec.task_type: case.oracle.num_calls for case in cases},
    }
    suggestions = {
        "min_tokens": by_type if len(by_type) > 1 else next(iter(by_type.values())),
        "budget.call_timeout_s": max(1.0, math.ceil(HEADROOM * call_p95)),
        "agent.timeout_sec": max(30.0, 10 * math.ceil(HEADROOM * episode_p95 / 10)),
        "budget.max_turns": max(4, 2 * max(len(case.oracle.rounds) + 1 for case in cases)),
        "budget.max_output_bytes": _round_up(max(sizes, default=0)),
    }
    step.note = (
        f"call p50 {step.data['call_s']['p50'] * 1000:.1f} ms, p95 {call_p95 * 1000:.1f} ms, "
        f"episode p95 {episode_p95:.2f} s"
    )
    return step, suggestions


def _cut(runs: Sequence[tuple[Case, Played]], max_bytes: int, step: Step) -> None:
    """Answers of the oracle's calls that the policy sees only in part; an error when what the
    solution goes on with is nowhere in what can be seen."""
    for case, played in runs:
        for number, seen in enumerate(played.observations, start=1):
            found = _CUT.search(seen.text)
            if found is None:
                continue
            texts = [case.spec.instruction, *(other.text for other in played.observations[:number])]
            texts += [json.dumps(tool.schema, ensure_ascii=False) for tool in case.spec.tools]
            hidden = [
                value
                for _, arguments in decoded_calls(case)[number:]
                for value in arguments.values()
                if isinstance(value, str) and 1 < len(value) < 80
                and not any(value in text for text in texts)
            ]  # fmt: skip
            lost = (
                f"; {hidden[0]!r}, which it goes on with, is not in what is left" if hidden else ""
            )
            step.add(
                "truncated-output",
                f"oracle: call {number} ({seen.tool})",
                f"its answer of {found[1]} bytes is cut to {max_bytes}{lost}; raise "
                "metadata.parl.budget.max_output_bytes or give the tool pages",
                "error" if hidden else "warning",
            )
            return


def _declared(case: Case, tokens: int, step: Step) -> None:
    spec = case.spec
    if spec.min_tokens is not None and spec.min_tokens > tokens:
        step.add(
            "min-tokens-too-high",
            "task.toml: metadata.parl.min_tokens",
            f"{spec.min_tokens} is declared as the least, but the oracle of {spec.name} needs "
            f"{tokens}: correct short answers would be taken for guesses",
        )
    turns = len(case.oracle.rounds) + 1
    if turns > spec.limits.max_turns:
        step.add(
            "oracle-over-budget",
            "task.toml: metadata.parl.budget.max_turns",
            f"the oracle takes {turns} turns, allowed are {spec.limits.max_turns}",
        )
    elif turns == spec.limits.max_turns:
        step.add(
            "tight-turns",
            "task.toml: metadata.parl.budget.max_turns",
            f"the oracle needs all {turns} turns that are allowed; one call that fails and is "
            f"repeated loses the episode; allow {max(4, 2 * turns)}",
        )
    units = spec.budget_units.get("calls")
    if units is not None and case.oracle.num_calls > units:
        step.add(
            "oracle-over-budget",
            "task.toml: metadata.parl.budget.units.calls",
            f"the oracle makes {case.oracle.num_calls} calls, the budget counts {units:g}",
            "warning",
        )


def _round_up(size: int) -> int:
    """The next power of two above twice ``size``, at least 256."""
    return max(256, 1 << (2 * size).bit_length())
