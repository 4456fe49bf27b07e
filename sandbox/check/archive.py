"""A task folder as one deterministic tar.gz, and back without trusting it."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path, PurePosixPath

from sandbox.check.certificate import FILE
from sandbox.check.subject import OWN_FOLDER, content_files
from sandbox.errors import TaskError

MAX_BYTES = 64 << 20


def pack_folder(folder: Path) -> bytes:
    """Equal content gives equal bytes; the certificate goes along. TaskError for links and for
    more than 64 MiB."""
    plain = io.BytesIO()
    paths = content_files(folder)
    certificate = folder / OWN_FOLDER / FILE
    if certificate.is_file():
        paths.append(certificate)
    total = 0
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                raise TaskError(f"{path}: is a link; a published task holds its files itself")
            content = path.read_bytes()
            total += len(content)
            if total > MAX_BYTES:
                raise TaskError(f"{folder}: more than {MAX_BYTES >> 20} MiB; publish less data")
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), mtime=0)


def unpack_folder(archive: bytes, folder: Path) -> None:
    """Write the files into a new folder. TaskError when it exists, or for any entry that is not a
    plain file below it (links and special files are never made)."""
    if folder.exists():
        raise TaskError(f"{folder}: exists already; choose another place")
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        entries = tar.getmembers()
        for entry in entries:
            path = PurePosixPath(entry.name)
            if not entry.isfile() or path.is_absolute() or ".." in path.parts:
                raise TaskError(f"archive: {entry.name!r} is no plain file of a task")
        for entry in entries:
            content = tar.extractfile(entry)
            assert content is not None, f"{entry.name} is a file"
            target = folder / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read(MAX_BYTES))
            target.chmod(0o755 if entry.mode & 0o100 else 0o644)
