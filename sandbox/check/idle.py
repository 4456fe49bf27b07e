"""What doing nothing earns: nothing, or every action can only lose it."""

from __future__ import annotations

from sandbox.check.episodes import Played
from sandbox.check.findings import Step


def earned(played: Played) -> float:
    """Correctness, 0 where there is no verdict (which is another finding)."""
    return played.verdict.correctness or 0.0


def nop_is_paid(runs: list[Played], step: Step) -> None:
    """Runs of the agent that does nothing; one that passes is told as "passing-nop"."""
    paid = max(earned(played) for played in runs)
    if paid > 0 and not any(played.passed for played in runs):
        step.add(
            "nop-is-paid",
            "tests/",
            f"doing nothing earns {paid:g} of 1, which every action can only lose, so a policy "
            "learns to do nothing; pay for progress alone, and take what an untouched world is "
            "worth off the score",
        )


def idle_is_paid(played: Played, step: Step) -> None:
    """Another agent that did not pass: without a call that succeeds it made no progress either."""
    if earned(played) > 0 and all(seen.error is not None for seen in played.observations):
        step.add(
            "nop-is-paid",
            f"agent {played.agent}",
            f"earns {earned(played):g} of 1 without a call that succeeds; pay for progress alone",
        )
