"""JSON lines that several processes may append to, and that any JSON reader accepts."""

from __future__ import annotations

import json
import math
import numbers
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def json_line(values: Mapping[str, Any]) -> str:
    """One line of strict JSON: NaN and infinity are null, numpy scalars numbers, the rest text."""
    try:
        return json.dumps(values, allow_nan=False, ensure_ascii=False, default=_plain)
    except (ValueError, TypeError):  # a number that is not finite, a key that is no string
        return json.dumps(_finite(values), allow_nan=False, ensure_ascii=False, default=_plain)


class JsonlFile:
    """Appends records to a file; each record is one ``write`` to an O_APPEND descriptor, which
    Linux does not interleave with other processes' on a local file system.

    A full disk must not end a run: the record is dropped, stderr says so once, and later records
    are tried again.
    """

    def __init__(self, path: Path) -> None:
        """OSError when ``path`` cannot be opened for appending."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._failed = False

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one record; it is in the kernel when this returns (survives kill -9)."""
        # a lone surrogate in a sampled text is no UTF-8
        data = (json_line(values) + "\n").encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            if not self._failed:
                self._failed = True
                sys.stderr.write(f"{self.path}: record dropped: {error.strerror}; free space\n")

    def close(self) -> None:
        """Close the descriptor; append may not be called afterwards."""
        os.close(self._fd)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Records in file order. A line torn by a full disk or a power cut is passed over and counted
    on stderr; a torn last line is a record that is being written and is nobody's fault."""
    torn: list[int] = []
    number = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                torn.append(number)
                continue
            yield record
    lost = [line for line in torn if line != number]
    if lost:
        sys.stderr.write(f"{path}: {len(lost)} torn lines passed over, the first is {lost[0]}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
