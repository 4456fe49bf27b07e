"""RecordStore: cold records in a bounded part of host memory and in a mapped file.

Thread-safe. A record is written once and read any number of times. When the host part is full, the
records that have lain there longest move to the file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.errors import CapacityError
from engine.kvcache.records import Header, read_record, write_record

SEGMENT_RECORDS = 64
"""Records the file grows by."""


@dataclass(slots=True)
class _Entry:
    header: Header
    host: np.ndarray | None
    place: int = -1
    """Number of the record in the file."""


class RecordFile:
    """Records of one size in an unlinked file, mapped segment by segment."""

    def __init__(self, directory: Path, record_bytes: int) -> None:
        assert record_bytes % mmap.ALLOCATIONGRANULARITY == 0, f"{record_bytes} is not whole pages"
        directory.mkdir(parents=True, exist_ok=True)
        # unlinked at once by the system: a crash leaves nothing behind
        self._file: BinaryIO = tempfile.TemporaryFile(dir=directory, prefix="kv-")  # noqa: SIM115
        self._record_bytes = record_bytes
        self._segments: list[mmap.mmap] = []
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        return len(self._segments) * SEGMENT_RECORDS * self._record_bytes

    def take(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def view(self, place: int) -> np.ndarray:
        """uint8 [record_bytes], shared with the file."""
        segment, index = divmod(place, SEGMENT_RECORDS)
        return np.frombuffer(
            self._segments[segment], np.uint8, self._record_bytes, index * self._record_bytes
        )

    def close(self) -> None:
        # not closed one by one: a reader may still hold a view, the memory goes with the last one
        self._segments.clear()
        self._file.close()

    def _grow(self) -> None:
        size = SEGMENT_RECORDS * self._record_bytes
        start = len(self._segments) * size
        # real blocks now: writing to a hole of a full disk would end the process with SIGBUS
        os.posix_fallocate(self._file.fileno(), start, size)
        self._segments.append(mmap.mmap(self._file.fileno(), size, offset=start))
        first = len(self._segments) * SEGMENT_RECORDS
        self._free += range(first - 1, first - SEGMENT_RECORDS - 1, -1)


class RecordStore:
    """``directory`` None: host memory only."""

    def __init__(
        self, model: bytes, record_bytes: int, host_bytes: int, directory: Path | None
    ) -> None:
        self._model = model
        self._record_bytes = record_bytes
        self._host_bytes = host_bytes
        self._entries: dict[int, _Entry] = {}
        self._in_host: dict[int, None] = {}
        self._serial = 0
        self._lock = threading.Lock()
        self._file = None if directory is None else RecordFile(directory, record_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def host_bytes(self) -> int:
        with self._lock:
            return len(self._in_host) * self._record_bytes

    @property
    def disk_bytes(self) -> int:
        """Of records; the file is larger by what it grew in advance."""
        with self._lock:
            return (len(self._entries) - len(self._in_host)) * self._record_bytes

    def put(self, block_id: int, position: int, payload: np.ndarray) -> int:
        """Keep payload uint8 [n]; its serial. CapacityError when neither part has room, OSError
        from a full disk."""
        with self._lock:
            self._serial += 1
            entry = _Entry(Header(self._model, block_id, position, self._serial), None)
            fits = self._record_bytes <= self._host_bytes
            if fits and (len(self._in_host) + 1) * self._record_bytes > self._host_bytes:
                fits = self._file is not None
                if fits:
                    self._move_down(next(iter(self._in_host)))
            if fits:
                entry.host = np.empty(self._record_bytes, np.uint8)
                write_record(entry.host, entry.header, payload)
                self._in_host[self._serial] = None
            elif self._file is not None:
                entry.place = self._file.take()
                write_record(self._file.view(entry.place), entry.header, payload)
            else:
                raise CapacityError(
                    f"{len(self._in_host)} cold records of {self._record_bytes} bytes fill "
                    f"host_bytes={self._host_bytes}; raise it, or set cold = 'disk'"
                )
            self._entries[self._serial] = entry
            return self._serial

    def load(self, serial: int) -> np.ndarray:
        """A copy of the payload. BlockCorrupt when it is not what was put."""
        with self._lock:
            entry = self._entries[serial]
            if entry.host is not None:
                return read_record(entry.host, entry.header, "host memory").copy()
            assert self._file is not None, "a record is in host memory or in the file"
            view = self._file.view(entry.place)
            return read_record(view, entry.header, f"place {entry.place} of the file").copy()

    def is_on_disk(self, serial: int) -> bool:
        with self._lock:
            return self._entries[serial].host is None

    def record(self, serial: int) -> np.ndarray:
        """The stored bytes themselves, for checks of what happens when they rot."""
        with self._lock:
            entry = self._entries[serial]
            if entry.host is not None:
                return entry.host
            assert self._file is not None, "a record is in host memory or in the file"
            return self._file.view(entry.place)

    def free(self, serial: int) -> None:
        with self._lock:
            entry = self._entries.pop(serial)
            if entry.host is not None:
                del self._in_host[serial]
            elif self._file is not None:
                self._file.give_back(entry.place)

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._in_host.clear()
            if self._file is not None:
                self._file.close()

    def _move_down(self, serial: int) -> None:
        entry = self._entries[serial]
        assert self._file is not None and entry.host is not None, "checked by the caller"
        entry.place = self._file.take()
        self._file.view(entry.place)[:] = entry.host
        entry.host = None
        del self._in_host[serial]
