"""Progress lines: done/total, rates, tokens, gates, mismatch, time left."""

from __future__ import annotations

import io

import pytest

from parl.report import words
from parl.report.bar import open_progress
from parl.report.progress import PlainProgress, WrittenLines
from parl.rounds.reports import EvalReport, RoundReport, RunSummary


def report(index: int) -> RoundReport:
    return RoundReport(
        index=index,
        num_rounds=10,
        phase="train",
        success={"lookup": 0.91, "add": 0.53},
        mean_tokens={"lookup": 20.0, "add": 30.0},
        tokens_per_solved={"lookup": 22.0, "add": None},
        gate_open={"lookup": True, "add": False},
        stage=0,
        reward_mean=0.7,
        metrics={"max_abs_dlogp": 3e-6, "expert_flip_share": 0.0005},
        outcomes={"completed": 60, "loop": 4},
    )


EVAL = EvalReport(
    name="before",
    episodes=8,
    success=0.5,
    success_by_type={"add": 0.5},
    mean_tokens=30.0,
    mean_tokens_by_type={"add": 30.0},
    tokens_per_solved=60.0,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_round_line_has_everything():
    """One line: position, success, tokens per solved, gates, violations, mismatch, time left."""
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    progress.phase_started("rounds")
    clock.now = 2.0
    progress.round_done(report(0))
    line = stream.getvalue().splitlines()[-1]
    assert line == (
        "round  1/10 | success add .530 lookup .910 | tokens/solved add - lookup 22.0 "
        "| stage 0 gate lookup | reward +0.700 | loop 4 | max|dlogp| 3.0e-06 flips 0.05% "
        "| 2.0 s | left 0:18"
    )


def test_time_left_counts_the_last_evaluation():
    """The evaluation after the rounds takes about as long as the one before."""
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    progress.phase_started("eval before")
    clock.now = 30.0
    progress.eval_done(EVAL)
    progress.phase_started("rounds")
    clock.now = 31.0
    progress.round_done(report(8))
    assert stream.getvalue().rstrip().endswith("left 0:31")


def test_warm_steps_are_thinned_but_the_last_is_shown():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    progress.phase_started("warm start")
    for step in range(1, 101):
        clock.now = step * 0.1
        progress.warm_step(step, 100, 1.0)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("warm start ")]
    assert len(lines) == 3 and lines[0] == "warm start 1/100 | loss 1.000 | left ?"
    assert lines[1] == "warm start 51/100 | loss 1.000 | left 0:05"
    assert lines[-1].startswith("warm start 100/100")


def test_no_terminal_means_plain_lines():
    """A stream that is no terminal gets no control codes."""
    stream = io.StringIO()
    progress = open_progress(stream)
    progress.phase_started("rounds")
    progress.round_done(report(0))
    progress.finished(RunSummary("r-1", "runs/r-1", None, None, 10, 10, 61.0))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "== finished r-1: 10 rounds in 1:01 | runs/r-1"


def test_a_resumed_run_does_not_claim_the_time_of_all_rounds():
    """Time and rounds in one sentence belong together."""
    stream = io.StringIO()
    PlainProgress(stream).finished(RunSummary("r-1", "runs/r-1", None, None, 10, 3, 61.0))
    expected = "== finished r-1: 10 rounds in 1:01 of this process for the last 3 | runs/r-1\n"
    assert stream.getvalue() == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0.4, "0:00"), (72.4, "1:12"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert words.duration(seconds) == text


def test_rates_have_three_digits():
    assert [words.rate(v) for v in (None, 0.9316, 1.0, 0.0)] == ["-", ".932", "1.00", ".000"]


def test_written_demonstrations_are_told_every_few_seconds_and_at_the_end():
    stream, clock = io.StringIO(), Clock()
    lines = WrittenLines(stream, clock)
    for done in range(1, 41):
        clock.now = done * 0.1
        lines(done, 40)
    assert stream.getvalue().splitlines() == [
        "demonstrations 25/40 | 10/s | left 0:02",
        "demonstrations 40/40 | 10/s | left 0:00",
    ]
