"""The terminal variant of progress: the same lines, and one bar below them while rounds run."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from parl.report import words
from parl.report.progress import PlainProgress
from parl.rounds.reports import EvalReport, Progress, RoundReport, RunSummary


def open_progress(stream: TextIO) -> Progress:
    """A bar below the lines on a terminal, plain lines elsewhere."""
    return BarProgress(stream) if stream.isatty() else PlainProgress(stream)


class BarProgress(PlainProgress):
    """Lines scroll above the bar. The bar is removed when a phase ends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bar: RichProgress | None = None

    def phase_started(self, name: str) -> None:
        self._close()
        super().phase_started(name)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left {task.fields[left]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.add_task(name, total=None, left="?")
        self._bar.start()

    def warm_step(self, done: int, total: int, loss: float) -> None:
        super().warm_step(done, total, loss)
        self._advance(done, total, self.warm_left(done, total))

    def round_done(self, report: RoundReport) -> None:
        super().round_done(report)
        self._advance(report.index + 1, report.num_rounds, self.time_left(report))

    def eval_done(self, report: EvalReport) -> None:
        self._close()
        super().eval_done(report)

    def finished(self, summary: RunSummary) -> None:
        self._close()
        super().finished(summary)

    def _advance(self, done: int, total: int, left: float | None) -> None:
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, left=words.duration(left))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False)
