# ruff: noqa: PTH101, PTH102, PTH115, PTH123, PTH208, PTH211
"""Files of a box's working directory, listed, read and written by its worker without following a
link. Standard library only; shipped as text with the agent, never imported by the host."""

from __future__ import annotations

import base64
import contextlib
import os
import stat
from typing import Any

FILE_METHODS = ("list_files", "read_file", "write_file")
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


def run(workdir: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """List, read or write below ``workdir`` without following any link; refusals are data."""
    try:
        if method == "list_files":
            return {"value": list_files(workdir, params)}
        directory = open_parent(workdir, params["path"], create=method == "write_file")
        try:
            work = write_file if method == "write_file" else read_file
            return {"value": work(directory, params["path"].rpartition("/")[2], params)}
        finally:
            os.close(directory)
    except (OSError, ValueError) as error:
        return {"value": f"{type(error).__name__}: {error}", "error": "tool_error"}


def fill(folders: list[list[Any]]) -> None:
    """Copy each folder's seed into it: folders, files and links as they are, owners left out.
    ``folders``: [path, seed or None, mode] of memory file systems that are empty."""
    for path, seed, mode in folders:
        if seed is not None:
            for name in os.listdir(seed):
                _copy(f"{seed}/{name}", f"{path}/{name}")
        os.chmod(path, mode)


def _copy(source: str, target: str) -> None:
    state = os.lstat(source)
    if stat.S_ISLNK(state.st_mode):
        os.symlink(os.readlink(source), target)
        return
    try:
        if stat.S_ISDIR(state.st_mode):
            names = os.listdir(source)
            os.mkdir(target)
            for name in names:
                _copy(f"{source}/{name}", f"{target}/{name}")
        else:
            with open(source, "rb") as read, open(target, "wb") as write:
                while chunk := read.read(1 << 20):
                    write.write(chunk)
    except PermissionError:  # another user's, which the image does not show this one
        return
    os.chmod(target, stat.S_IMODE(state.st_mode))
    os.utime(target, (state.st_mtime, state.st_mtime))


def list_files(workdir: str, params: dict[str, Any]) -> list[list[Any]]:
    """[path, kind, size, mode, [[start, end], ...] of data] of everything below ``workdir``.

    Up to ``max_entries`` + 1 of them, and one level below ``max_depth``, so that the host sees what
    is too much. Names that are not UTF-8 keep their bytes as surrogates."""
    entries: list[list[Any]] = []
    pending = [("", 1)]
    while pending:
        parent, depth = pending.pop()
        directory = open_parent(workdir, f"{parent}/x" if parent else "x", create=False)
        try:
            for name in sorted(os.listdir(directory)):
                path = f"{parent}/{name}" if parent else name
                state = os.stat(name, dir_fd=directory, follow_symlinks=False)
                kind = KINDS.get(stat.S_IFMT(state.st_mode), "other")
                extents = data_extents(directory, name) if kind == "file" else []
                mode = stat.S_IMODE(state.st_mode)
                entries.append([path, kind, state.st_size, mode, extents])
                if len(entries) > params["max_entries"]:
                    return entries
                if kind == "directory" and depth <= params["max_depth"]:
                    pending.append((path, depth + 1))
        finally:
            os.close(directory)
    return entries


def data_extents(directory: int, name: str) -> list[list[int]]:
    """The parts of a file that are not holes; at most 1,000, then one to its end."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, flags, dir_fd=directory)
    try:
        extents: list[list[int]] = []
        size, end = os.fstat(fd).st_size, 0
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError:  # ENXIO: a hole up to the end
                break
            end = size if len(extents) == 999 else os.lseek(fd, start, os.SEEK_HOLE)
            extents.append([start, end])
        return extents
    finally:
        os.close(fd)


def open_parent(workdir: str, path: str, create: bool) -> int:
    """Directory fd of the last component's parent; each step refuses a link (ELOOP, ENOTDIR)."""
    parts = path.split("/")
    if path.startswith("/") or "" in parts or ".." in parts or "." in parts or "\0" in path:
        raise ValueError(f"path {path!r}: expected names joined by /")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    fd = os.open(workdir, flags)
    try:
        for part in parts[:-1]:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            inner = os.open(part, flags, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError:
        os.close(fd)
        raise
    return fd


def read_file(directory: int, name: str, params: dict[str, Any]) -> str:
    """Base64 of ``size`` bytes at ``offset`` of a regular file."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{params['path']!r} is not a regular file")
        return base64.b64encode(os.pread(fd, params["size"], params["offset"])).decode()
    finally:
        os.close(fd)


def write_file(directory: int, name: str, params: dict[str, Any]) -> None:
    """Write base64 ``data`` at ``offset``; offset 0 makes the file anew, whatever had the name."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    if params["offset"] == 0:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        flags |= os.O_CREAT | os.O_EXCL
    fd = os.open(name, flags, params["mode"], dir_fd=directory)
    try:
        os.fchmod(fd, params["mode"])
        data = memoryview(base64.b64decode(params["data"]))
        offset = params["offset"]
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(fd)
