"""Progress: done/total, rate and time left, as a live bar on a terminal and as lines elsewhere.

with Progress("rollout", total=128, unit="episodes") as progress:
    progress.advance()
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

PLAIN_INTERVAL_S = 10.0


class Progress:
    """Counts up to ``total`` (None = unknown). Not thread-safe on purpose: one loop owns it."""

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        unit: str = "",
        done: int = 0,
        stream: TextIO | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``done`` at the start (a resumed run) does not count for the rate. Plain lines come at
        most every ``interval_s`` plus one at the end."""
        self.label = label
        self.total = total
        self.unit = unit
        self.done = done
        self._stream = stream or sys.stderr
        self._interval_s = interval_s
        self._clock = clock
        self._first = done
        self._start = self._last = clock()
        self._printed = ""
        self._bar: RichProgress | None = None
        self._note = ""
        if self._stream.isatty():
            self._bar = RichProgress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task(self._line(), total=total, completed=done)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._print()

    def advance(self, num: int = 1, note: str = "") -> None:
        """``num`` more are done; ``note`` replaces the words at the line's end."""
        self.done += num
        self._note = note or self._note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=self._line())
        elif self._clock() - self._last >= self._interval_s:
            self._print()

    def _line(self) -> str:
        elapsed = self._clock() - self._start
        line = progress_line(
            self.label, self.done, self.total, self.done - self._first, elapsed, self.unit
        )
        return f"{line} {self._note}".rstrip()

    def _print(self) -> None:
        self._last = self._clock()
        line = self._line()
        if line != self._printed:
            self._printed = line
            self._stream.write(line + "\n")
            self._stream.flush()


def progress_line(
    label: str, done: int, total: int | None, recent: int, elapsed_s: float, unit: str = ""
) -> str:
    """``rollout 30/120 episodes, 2.5/s, 36 s left``; ``recent`` of ``done`` took ``elapsed_s``."""
    count = f"{done}/{total}" if total is not None else str(done)
    parts = [f"{label} {count} {unit}".rstrip()]
    rate = recent / elapsed_s if elapsed_s > 0 else 0.0
    if rate:
        parts.append(f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each")
    if total is not None and done >= total:
        parts.append(f"took {_duration(elapsed_s)}")
    elif total is not None and rate:
        parts.append(f"{_duration((total - done) / rate)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
