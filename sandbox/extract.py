"""Files out of a box and into it. Regular files and directories only; nothing follows a link.

The box lists, reads and writes its own working directory (``sandbox.backends.agent_files``); this
side trusts none of it: names, kinds, counts, sizes and depth are checked again here, and what it
writes goes through directory descriptors into a folder that did not exist before. No archive format
is involved, so no archive's rules about links, devices or owners either (facts/sandboxes.md 5.2:
tarfile's "data" filter can be led out of its folder).
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.backends.base import Box, Reply
from sandbox.errors import SandboxError

_CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Caps on one copy. A sparse file counts with its apparent size: whoever reads it next would
    read that much."""

    max_entries: int = 2000
    max_file_bytes: int = 16 << 20
    max_total_bytes: int = 64 << 20
    max_depth: int = 16
    max_name_bytes: int = 255
    timeout_s: float = 30.0


class CopyRefused(SandboxError):
    """More than the limits allow, or an entry that cannot be what the box says. Nothing of the copy
    may be used."""


@dataclass(slots=True)
class CopyReport:
    """What was copied; ``skipped``: path and kind of what is neither file nor directory."""

    files: list[str] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    num_bytes: int = 0
    """Apparent sizes of the files."""
    num_data_bytes: int = 0
    """Bytes that crossed; holes do not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing. ``extents``: (start, end) of the data between holes."""

    path: str
    kind: str
    size: int
    mode: int
    extents: tuple[tuple[int, int], ...]


async def copy_out(
    box: Box, destination: Path, limits: CopyLimits | None = None, only: Iterable[str] = ()
) -> CopyReport:
    """Copy the working directory (or what lies at or below the names in ``only``) to a new folder.

    First every process of the episode is killed, so nothing changes meanwhile. CopyRefused when the
    box holds more than ``limits``; SandboxLost when it dies. Links, devices, pipes and sockets are
    skipped and reported. Owner and times are not kept; of the mode only "executable" is.
    """
    limits = limits or CopyLimits()
    asked = {"max_entries": limits.max_entries, "max_depth": limits.max_depth}
    listing = parse_listing(await _ask(box, "list_files", asked, limits), limits)
    chosen = tuple(only)
    if chosen:
        listing = [entry for entry in listing if _within(entry.path, chosen)]
    report = CopyReport()
    destination.mkdir(mode=0o700)
    for entry in listing:
        if entry.kind == "directory":
            os.close(_open_below(destination, entry.path, make=True))
            report.directories.append(entry.path)
        elif entry.kind == "file":
            await _copy_file(box, entry, destination, limits, report)
        else:
            report.skipped.append((entry.path, entry.kind))
    return report


async def copy_in(box: Box, source: Path, limits: CopyLimits | None = None) -> CopyReport:
    """Copy a host folder into the working directory, which is written by the box's own uid.

    A link somebody planted there is not followed: a path through it is refused (CopyRefused), a
    file's own name is replaced. Links in ``source`` are skipped and reported.
    """
    limits = limits or CopyLimits()
    report = CopyReport()
    for entry in walk(source, limits):
        if entry.kind == "file":
            fd = os.open(source / entry.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                await _write_file(box, entry, fd, limits)
            finally:
                os.close(fd)
            report.files.append(entry.path)
            report.num_bytes += entry.size
            report.num_data_bytes += entry.size
        elif entry.kind == "directory":
            report.directories.append(entry.path)
        else:
            report.skipped.append((entry.path, entry.kind))
    return report


def walk(source: Path, limits: CopyLimits) -> list[Entry]:
    """Listing of a folder of this machine, without following links; CopyRefused above limits."""
    from sandbox.backends import agent_files

    asked = {"max_entries": limits.max_entries, "max_depth": limits.max_depth}
    return parse_listing(agent_files.list_files(str(source), asked), limits)


def parse_listing(listing: Any, limits: CopyLimits) -> list[Entry]:
    """Entries sorted so that a directory comes before what it holds; CopyRefused for anything that
    an honest listing cannot contain or that exceeds ``limits``."""
    if not isinstance(listing, list):
        raise CopyRefused(f"the box's listing is a {type(listing).__name__}, expected a list")
    if len(listing) > limits.max_entries:
        raise CopyRefused(f"more than {limits.max_entries} entries; raise max_entries to copy them")
    entries = sorted((_entry(item, limits) for item in listing), key=lambda entry: entry.path)
    kinds: dict[str, str] = {}
    total = 0
    for entry in entries:
        parent = entry.path.rpartition("/")[0]
        if entry.path in kinds or (parent and kinds.get(parent) != "directory"):
            raise CopyRefused(f"{entry.path!r}: listed twice, or not below a listed directory")
        kinds[entry.path] = entry.kind
        total += entry.size if entry.kind == "file" else 0
        if total > limits.max_total_bytes:
            raise CopyRefused(
                f"the files hold more than {limits.max_total_bytes} bytes; raise max_total_bytes"
            )
    return entries


def _entry(item: Any, limits: CopyLimits) -> Entry:
    try:
        path, kind, size, mode, extents = item
        entry = Entry(path, kind, size, mode, tuple((start, end) for start, end in extents))
        numbers = [size, mode, *(bound for extent in entry.extents for bound in extent)]
        honest = isinstance(path, str) and kind in ("file", "directory", "link", "other")
        honest = honest and all(type(number) is int and number >= 0 for number in numbers)
        bounds = [bound for extent in entry.extents for bound in extent]
        honest = honest and bounds == sorted(bounds) and (not bounds or bounds[-1] <= size)
    except (TypeError, ValueError) as error:
        raise CopyRefused(f"listed entry {item!r:.100}: {error}") from error
    if not honest:
        raise CopyRefused(f"listed entry {item!r:.100}: expected path, kind, size, mode, extents")
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise CopyRefused(f"listed path {path!r:.100}: expected names joined by /")
    if len(parts) > limits.max_depth:
        raise CopyRefused(f"{path!r:.100} is deeper than max_depth={limits.max_depth}")
    if any(len(os.fsencode(part)) > limits.max_name_bytes for part in parts):
        raise CopyRefused(f"{path!r:.100}: a name is longer than {limits.max_name_bytes} bytes")
    if kind == "file" and size > limits.max_file_bytes:
        raise CopyRefused(
            f"{path!r:.100} is {size} bytes ({sum(e - s for s, e in entry.extents)} of data); at "
            f"most max_file_bytes={limits.max_file_bytes}"
        )
    return entry


def _within(path: str, chosen: tuple[str, ...]) -> bool:
    """At, below, or a parent of one of the names."""
    return any(f"{path}/".startswith(f"{n}/") or f"{n}/".startswith(f"{path}/") for n in chosen)


async def _copy_file(
    box: Box, entry: Entry, destination: Path, limits: CopyLimits, report: CopyReport
) -> None:
    parent, _, name = entry.path.rpartition("/")
    directory = _open_below(destination, parent)
    try:
        fd = os.open(name, _NEW, 0o700 if entry.mode & 0o100 else 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        os.ftruncate(fd, entry.size)
        for start, end in entry.extents:
            for offset in range(start, end, _CHUNK):
                size = min(_CHUNK, end - offset)
                asked = {"path": entry.path, "offset": offset, "size": size}
                data = _decoded(await _ask(box, "read_file", asked, limits), entry.path)
                if len(data) != size:
                    raise CopyRefused(f"{entry.path!r}: {len(data)} bytes, listed were {size}")
                os.pwrite(fd, data, offset)
                report.num_data_bytes += size
    finally:
        os.close(fd)
    report.files.append(entry.path)
    report.num_bytes += entry.size


async def _write_file(box: Box, entry: Entry, fd: int, limits: CopyLimits) -> None:
    mode = 0o700 if entry.mode & 0o100 else 0o600
    for offset in range(0, max(entry.size, 1), _CHUNK):
        data = base64.b64encode(os.pread(fd, _CHUNK, offset)).decode()
        await _ask(
            box,
            "write_file",
            {"path": entry.path, "offset": offset, "data": data, "mode": mode},
            limits,
        )


async def _ask(box: Box, method: str, params: dict[str, Any], limits: CopyLimits) -> Any:
    wait_s = limits.timeout_s
    reply: Reply = await box.request(method, {**params, "timeout_s": wait_s}, wait_s + 5.0)
    if reply.error is not None:
        raise CopyRefused(f"{method} in the box: {reply.error} ({reply.value})")
    return reply.value


def _decoded(value: Any, path: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError) as error:
        raise CopyRefused(f"{path!r}: the box sent no base64: {error}") from error


def _open_below(root: Path, path: str, make: bool = False) -> int:
    """Descriptor of a directory below ``root``; no step may be a link. ``make``: the last one."""
    fd = os.open(root, _DIRECTORY)
    parts = path.split("/") if path else []
    for number, part in enumerate(parts):
        try:
            if make and number == len(parts) - 1:
                os.mkdir(part, 0o700, dir_fd=fd)
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    assert stat.S_ISDIR(os.fstat(fd).st_mode)
    return fd
