"""Logs: JSON file, console line, bound values, progress lines."""

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from infra.errors import ConfigError
from infra.jsonl import read_jsonl
from infra.log import Progress, bind, bound, configure
from infra.log.progress import progress_line
from infra.log.setup import LOG_FILE


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    structlog.contextvars.clear_contextvars()  # pytest -n: another module may have bound some
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_event_goes_to_file_and_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has everything as JSON, the console one short line without colour."""
    configure(tmp_path, "info")
    before = time.time()
    structlog.get_logger("x").info("round_finished", reward=0.123456, text="a\nb", n=3)
    (record,) = read_jsonl(tmp_path / LOG_FILE)
    assert before <= record.pop("time") <= time.time()
    assert record.pop("pid") > 0
    assert record == {
        "level": "info",
        "event": "round_finished",
        "reward": 0.123456,
        "text": "a\nb",
        "n": 3,
    }
    line = capsys.readouterr().err
    assert line.endswith(r" info    round_finished reward=0.12346 text=a\nb n=3" + "\n")
    assert "\x1b" not in line


def test_level_and_quiet_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Events below the level go nowhere; console=False leaves the file alone."""
    configure(tmp_path, "warning", console=False)
    log = structlog.get_logger()
    log.info("small")
    log.warning("big")
    assert [record["event"] for record in read_jsonl(tmp_path / LOG_FILE)] == ["big"]
    assert capsys.readouterr().err == ""


def test_bound_values_are_on_every_event(tmp_path: Path) -> None:
    """bind lasts, bound ends with its block; an event's own value wins."""
    configure(tmp_path, console=False)
    log = structlog.get_logger()
    bind(run="r1")
    with bound(round=3, episode="e"):
        log.info("inside", episode="f")
    log.info("outside")
    inside, outside = read_jsonl(tmp_path / LOG_FILE)
    assert (inside["run"], inside["round"], inside["episode"]) == ("r1", 3, "f")
    assert outside["run"] == "r1" and "round" not in outside


def test_traceback_stays_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The console shows the exception's last line only."""
    configure(tmp_path)
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        structlog.get_logger().exception("failed")
    (record,) = read_jsonl(tmp_path / LOG_FILE)
    assert "Traceback" in record["exception"]
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "(ZeroDivisionError: division by zero)" in line


@pytest.mark.parametrize(
    "folder, level, message",
    [("run", "loud", "log level 'loud' is unknown"), ("file/run", "info", "Not a directory")],
)
def test_wrong_settings(tmp_path: Path, folder: str, level: str, message: str) -> None:
    """A level or folder that cannot be is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path / folder, level)


@pytest.mark.parametrize(
    "done, total, recent, elapsed_s, expected",
    [
        (0, 120, 0, 0.0, "roll 0/120 eps"),
        (30, 120, 30, 12.0, "roll 30/120 eps, 2.5/s, 36 s left"),
        (60, 120, 10, 20.0, "roll 60/120 eps, 2 s each, 2 min 0 s left"),
        (120, 120, 120, 4000.0, "roll 120/120 eps, 33.3 s each, took 1 h 6 min"),
        (7, None, 7, 7.0, "roll 7 eps, 1/s"),
    ],
)
def test_progress_line(
    done: int, total: int | None, recent: int, elapsed_s: float, expected: str
) -> None:
    """done/total, rate, time left; what was done before a resume does not count for the rate."""
    assert progress_line("roll", done, total, recent, elapsed_s, "eps") == expected


def test_plain_progress_is_rate_limited() -> None:
    """Off a terminal: a line an interval at most, and the final one."""
    stream, now = io.StringIO(), [0.0]
    with Progress("p", 100, stream=stream, interval_s=10, clock=lambda: now[0]) as progress:
        for _ in range(100):
            now[0] += 0.25
            progress.advance(note="x")
    assert stream.getvalue().splitlines() == [
        "p 40/100, 4/s, 15 s left x",
        "p 80/100, 4/s, 5 s left x",
        "p 100/100, 4/s, took 25 s x",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar is live and the last line stays."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress("p", 10, stream=stream) as progress:
        progress.advance(10)
    assert "\x1b[" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].endswith("took 0 s")
