"""Live progress of ``parl rl run``: one plain line a phase, a round, an evaluation.

Implementations of parl.rounds.reports.Progress. Lines are whole and flushed, so they read the same
in a terminal, a file and a Ray job's log; on a terminal a bar with rate and time left stays below.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from parl.report import words
from parl.rounds.reports import EvalReport, RoundReport, RunSummary

WARM_LINE_EVERY_S = 5.0
WRITTEN_LINE_EVERY_S = 2.5
RATE_WINDOW = 8


class WrittenLines:
    """Lines about demonstrations while they are written, beside those of a starting cluster."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = self._last_line = clock()

    def __call__(self, done: int, total: int) -> None:
        """Every few seconds and at the end."""
        now = self._clock()
        if done < total and now - self._last_line < WRITTEN_LINE_EVERY_S:
            return
        self._last_line = now
        rate = done / max(now - self._start, 1e-9)
        # one write: another thread writes lines to the same stream
        left = words.duration((total - done) / rate if done else None)
        self._stream.write(f"demonstrations {done}/{total} | {rate:.0f}/s | left {left}\n")
        self._stream.flush()


class PlainProgress:
    """Writes lines to ``stream``; ``clock`` returns seconds (monotonic)."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._phase_start = self._start
        self._last_round_end = self._start
        self._first_warm: tuple[int, float] | None = None
        self._last_warm_line = -WARM_LINE_EVERY_S
        self._round_seconds: deque[float] = deque(maxlen=RATE_WINDOW)
        self._eval_seconds: float | None = None

    def phase_started(self, name: str) -> None:
        now = self._clock()
        self._phase_start = self._last_round_end = now
        self._line(f"== {name} (after {words.duration(now - self._start)})")

    def warm_step(self, done: int, total: int, loss: float) -> None:
        """Written every few seconds and at the end: a step takes a fraction of a second."""
        now = self._clock()
        if self._first_warm is None:
            self._first_warm = (done, now)
        if done < total and now - self._last_warm_line < WARM_LINE_EVERY_S:
            return
        self._last_warm_line = now
        left = self.warm_left(done, total)
        self._line(f"warm start {done}/{total} | loss {loss:.3f} | left {words.duration(left)}")

    def round_done(self, report: RoundReport) -> None:
        now = self._clock()
        self._round_seconds.append(now - self._last_round_end)
        self._last_round_end = now
        self._line(round_line(report, self._round_seconds[-1], self.time_left(report)))

    def eval_done(self, report: EvalReport) -> None:
        self._eval_seconds = self._clock() - self._phase_start
        self._line(eval_line(report, self._eval_seconds))

    def finished(self, summary: RunSummary) -> None:
        took = words.duration(summary.seconds)
        if summary.rounds_here < summary.num_rounds:
            took = f"{took} of this process for the last {summary.rounds_here}"
        self._line(
            f"== finished {summary.run_id}: {summary.num_rounds} rounds in {took} | "
            f"{summary.run_dir}"
        )

    def warm_left(self, done: int, total: int) -> float | None:
        """Seconds at the rate since the first step: before it, demonstrations were written."""
        if self._first_warm is None or done <= self._first_warm[0]:
            return None
        first, since = self._first_warm
        return (self._clock() - since) / (done - first) * (total - done)

    def time_left(self, report: RoundReport) -> float | None:
        """Seconds: remaining rounds at the recent rate, and the last evaluation once more."""
        if not self._round_seconds:
            return None
        per_round = sum(self._round_seconds) / len(self._round_seconds)
        remaining = report.num_rounds - report.index - 1
        return per_round * remaining + (self._eval_seconds or 0.0)

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class NoProgress:
    """Says nothing (library use, tests)."""

    def phase_started(self, name: str) -> None: ...

    def warm_step(self, done: int, total: int, loss: float) -> None: ...

    def round_done(self, report: RoundReport) -> None: ...

    def eval_done(self, report: EvalReport) -> None: ...

    def finished(self, summary: RunSummary) -> None: ...


def round_line(report: RoundReport, seconds: float, left: float | None) -> str:
    """round 12/60 | success add .530 lookup .910 | tokens/solved ... | left 1:12"""
    opened = [name for name, is_open in sorted(report.gate_open.items()) if is_open]
    parts = [
        f"round {report.index + 1:>{len(str(report.num_rounds))}}/{report.num_rounds}",
        f"success {words.by_type(report.success, words.rate)}",
        f"tokens/solved {words.by_type(report.tokens_per_solved, words.tokens)}",
        f"stage {report.stage} gate {'+'.join(opened) or 'closed'}",
        f"reward {report.reward_mean:+.3f}",
        mismatch(report),
        f"{seconds:.1f} s",
        f"left {words.duration(left)}",
    ]
    unscored = {k: v for k, v in sorted(report.outcomes.items()) if k != "completed" and v}
    if unscored:
        parts.insert(5, " ".join(f"{name} {count}" for name, count in unscored.items()))
    return " | ".join(part for part in parts if part)


def mismatch(report: RoundReport) -> str:
    """Engine against learner on the same tokens: max |dlogp|, the shares of flipped experts and, in
    hybrid attention, of retrieved tokens that the learner would not have chosen and of codes of
    keys and values that it would have set differently."""
    text = (
        f"max|dlogp| {words.small(report.metrics.get('max_abs_dlogp'))} "
        f"flips {words.percent(report.metrics.get('expert_flip_share'))}"
    )
    for key in ("selection_flip_share", "kv_code_flip_share"):
        if key in report.metrics:
            text += f" / {words.percent(report.metrics[key])}"
    return text


def eval_line(report: EvalReport, seconds: float) -> str:
    return (
        f"eval {report.name} | {report.episodes} episodes | success {words.rate(report.success)} "
        f"({words.by_type(report.success_by_type, words.rate)}) "
        f"| tokens {words.tokens(report.mean_tokens)} "
        f"({words.by_type(report.mean_tokens_by_type, words.tokens)}) "
        f"| tokens/solved {words.tokens(report.tokens_per_solved)} | {seconds:.1f} s"
    )
