"""The real ``parl`` command in a process of its own, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARL = [sys.executable, "-m", "parl.cli.main"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended; ``seconds`` of wall time."""

    code: int
    output: str
    seconds: float

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.strip().splitlines()[-5:])


def run_parl(words: Sequence[str], log: Path, timeout_s: float) -> Finished:
    """Run to the end; stdout and stderr go to ``log``. TimeoutExpired after ``timeout_s``."""
    started = time.monotonic()
    with start_parl(words, log) as process:
        code = process.wait(timeout_s)
    return Finished(code, log.read_text(errors="replace"), time.monotonic() - started)


@contextmanager
def start_parl(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start; the process (not what it started) is killed if the block leaves it running."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen([*PARL, *words], cwd=ROOT, stdout=file, stderr=file)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
