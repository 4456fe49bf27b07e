"""AppendLog: an append-only JSONL file that says so when it cannot be written.

infra.jsonl drops a record on a full disk, right for logs; an audit line or a cassette record that
is silently missing would be a lie, so this one raises.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandbox.proxy.errors import RecordFailed


class AppendLog:
    """Whole lines or nothing, also with several writers; opened at the first record.

    A line torn by a crash is closed off when the file is opened next, so that it cannot swallow
    the line after it.
    """

    def __init__(self, path: Path, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        self._fd: int | None = None
        self._lock = threading.Lock()  # flock keeps processes apart, not threads

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one record; it survives kill -9, and with ``fsync`` a power cut.

        RecordFailed when the disk is full or the file cannot be opened; nothing of the record
        stays behind then.
        """
        line = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = (line + "\n").encode("utf-8", "backslashreplace")
        with self._lock:
            self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            fd = self._open()
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                end = os.fstat(fd).st_size
                if end and os.pread(fd, 1, end - 1) != b"\n":
                    data = b"\n" + data
                if (written := os.write(fd, data)) < len(data):
                    os.ftruncate(fd, end)
                    raise RecordFailed(f"{self.path.name}: {written} of {len(data)} bytes written")
                if self._fsync:
                    os.fdatasync(fd)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            if isinstance(error, RecordFailed):
                raise
            raise RecordFailed(f"{self.path.name} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Idempotent; a later append opens the file again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o600)
        return self._fd


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, record) in file order; None for a line that was torn by a crash."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                record = None
            yield number, record if isinstance(record, dict) else None
