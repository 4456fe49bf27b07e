"""structlog set-up: every event goes to <run_dir>/log.jsonl and, shortened, to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import WrappedLogger

from infra.errors import ConfigError
from infra.jsonl import JsonlFile

LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FILE = "log.jsonl"

_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_MAX_VALUE = 120
"""Characters of a value on the console; the file has all of it."""


def configure(run_dir: Path | None, level: str = "info", *, console: bool = True) -> None:
    """Set up logging of this process; any process of a run may call it with the same ``run_dir``.

    run_dir None: console only. ConfigError: unknown level or a folder that cannot be written.
    May be called again (a later call replaces the set-up).
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown: expected one of {', '.join(LEVELS)}")
    file = None
    if run_dir is not None:
        try:
            file = JsonlFile(run_dir / LOG_FILE)
        except OSError as error:
            raise ConfigError(
                f"{run_dir / LOG_FILE}: {error.strerror}; expected a run folder we may write"
            ) from error
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _Sinks(file, console),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )


def bind(**values: Any) -> None:
    """Add ``run=``, ``round=``, ``episode=`` ... to every later event of this context (task or
    thread)."""
    structlog.contextvars.bind_contextvars(**values)


def bound(**values: Any) -> AbstractContextManager[None]:
    """``bind`` for a ``with`` block."""
    return structlog.contextvars.bound_contextvars(**values)  # pyright: ignore[reportReturnType]


class _Sinks:
    """The last processor: writes the event and ends its way."""

    def __init__(self, file: JsonlFile | None, console: bool) -> None:
        self._file = file
        self._console = console

    def __call__(
        self, _logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]
    ) -> Any:
        now = time.time()
        if self._file is not None:
            head = {"time": now, "level": event["level"], "event": event["event"]}
            self._file.append({**head, **event, "pid": os.getpid()})
        if self._console:
            # looked up on each event: a live progress bar redirects sys.stderr
            stream = sys.stderr
            stream.write(console_line(event, now, colour=stream.isatty()) + "\n")
        raise structlog.DropEvent


def console_line(event: MutableMapping[str, Any], now: float, *, colour: bool = False) -> str:
    """``12:00:00 info round_finished round=3 reward=0.5``; of a traceback only its last line."""
    level = event["level"]
    words = [time.strftime("%H:%M:%S", time.localtime(now)), f"{level:<7}", str(event["event"])]
    for key, value in event.items():
        if key not in ("level", "event", "exception", "stack"):
            words.append(f"{key}={_short(value)}")
    if "exception" in event:
        words.append(f"({event['exception'].strip().splitlines()[-1]})")
    line = " ".join(words)
    prefix = _COLOURS.get(level, "") if colour and "NO_COLOR" not in os.environ else ""
    return f"{prefix}{line}\x1b[0m" if prefix else line


def _short(value: Any) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    # escape what would break the line or the terminal, surrogates included
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if not text or " " in text:
        text = f'"{text}"'
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
