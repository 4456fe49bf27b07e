"""Warm start, evaluate, rounds, evaluate. Each phase resumes from the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable

from parl.rounds.machine import RoundMachine
from parl.rounds.ports import LearnerPort
from parl.rounds.reports import Progress, RoundReport, RunSummary

FINISHED = "finished"
"""Status of a run that has nothing left to do."""
WarmStart = Callable[[LearnerPort, Callable[[int, int, float], None]], dict[str, float]]


def run_experiment(
    machine: RoundMachine,
    *,
    warm_start: WarmStart,
    step: Callable[[], RoundReport],
    progress: Progress,
    run_dir: str,
) -> RunSummary:
    """Go from wherever the ledger says the run is to its end.

    ``step`` runs one round: ``machine.step`` in process, ``PARL.train`` over Ray.
    """
    started = time.perf_counter()
    rounds = machine.config.rounds
    machine.restore()
    progress.phase_started("warm start")
    machine.warm_start(lambda learner: warm_start(learner, progress.warm_step))
    before = after = None
    if rounds.eval_episodes:
        progress.phase_started("eval before")
        before = machine.evaluate("before")
        progress.eval_done(before)
    progress.phase_started("rounds")
    first = machine.next_round
    while not machine.finished:
        progress.round_done(step())
    if rounds.eval_episodes:
        progress.phase_started("eval after")
        after = machine.evaluate("after")
        progress.eval_done(after)
    summary = RunSummary(
        run_id=machine.store.run_id,
        run_dir=run_dir,
        before=before,
        after=after,
        num_rounds=rounds.num_rounds,
        rounds_here=rounds.num_rounds - first,
        seconds=time.perf_counter() - started,
    )
    machine.store.set_run_status(FINISHED)
    progress.finished(summary)
    return summary
