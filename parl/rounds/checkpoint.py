"""Checkpoints that are there whole or not at all: temp folder, fsync, rename, then a ledger row.

A checkpoint's hash is the sha256 over its files' relative names and contents. A folder that no
committed row names is left over from a crash and is deleted at start.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import structlog
from safetensors import SafetensorError

from parl.errors import CheckpointError, RunError

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints in its run folder."""
TEMP_PREFIX = ".tmp-"
log = structlog.get_logger(__name__)


class Saves(Protocol):
    """The part of a learner that a checkpoint needs."""

    def save(self, folder: Path) -> None:
        """Write a complete restorable state into an existing empty folder."""
        ...


def write_checkpoint(learner: Saves, root: Path, name: str) -> tuple[Path, str]:
    """Save into ``root/name`` atomically; returns the path and its hash.

    RunError when the disk does not take it: nothing was committed, the last checkpoint is intact.
    """
    try:
        return _write(learner, root, name)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint {root / name} cannot be written: {error}; free space or correct the "
            "folder and resume, the last committed round is intact"
        ) from error


def _write(learner: Saves, root: Path, name: str) -> tuple[Path, str]:
    root.mkdir(parents=True, exist_ok=True)
    target = root / name
    temp = root / f"{TEMP_PREFIX}{name}"
    if temp.exists():
        shutil.rmtree(temp)
    temp.mkdir()
    learner.save(temp)
    digest = hash_folder(temp)
    for path in temp.rglob("*"):
        _fsync(path)
    _fsync(temp)
    if target.exists():
        # same name without a row: a crash came between rename and commit; the same bits again
        shutil.rmtree(target)
    temp.rename(target)
    _fsync(root)
    return target, digest


def verify_checkpoint(path: Path, expected: str) -> None:
    """CheckpointError unless ``path`` is the folder whose hash the ledger committed."""
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path} is missing; the ledger names it, so restore the folder from a copy"
        )
    found = hash_folder(path)
    if found != expected:
        raise CheckpointError(
            f"checkpoint {path} has hash {found[:12]}, the ledger expects {expected[:12]}: "
            "files were changed after the commit; restore the folder from a copy"
        )


def newest_intact(root: Path, committed: Sequence[tuple[str, str]]) -> int:
    """Index of the last of ``committed`` ((path, hash) in order of commit) that is whole under
    ``root``. Names count, not paths. A damaged one costs a replay of the rounds since the one
    before, not the run; CheckpointError of the newest when none is whole."""
    first_error: CheckpointError | None = None
    for index in range(len(committed) - 1, -1, -1):
        path, digest = committed[index]
        try:
            verify_checkpoint(root / Path(path).name, digest)
        except CheckpointError as error:
            if first_error is None:
                first_error = error
            continue
        if first_error is not None:
            log.warning("checkpoint_damaged", error=str(first_error), used=Path(path).name)
        return index
    assert first_error is not None, "no checkpoint was committed"
    raise first_error


def sweep(root: Path, named: Iterable[Path]) -> list[Path]:
    """Delete folders under ``root`` whose name no path of ``named`` has; returns what was deleted.

    Names count, not paths: a run folder that was moved, or is reached by another path than the one
    in the ledger, must not lose its checkpoints.
    """
    if not root.is_dir():
        return []
    keep = {path.name for path in named}
    removed = [p for p in sorted(root.iterdir()) if p.is_dir() and p.name not in keep]
    for path in removed:
        shutil.rmtree(path)
    return removed


def prune(root: Path, committed: Sequence[Path], keep: int) -> list[Path]:
    """Delete the folders of all but the last ``keep`` of ``committed`` (paths in order of commit);
    returns what was deleted. Their rows stay: the ledger is history, the disk is not."""
    old = {path.name for path in committed[:-keep]} - {path.name for path in committed[-keep:]}
    removed = [root / name for name in sorted(old) if (root / name).is_dir()]
    for path in removed:
        shutil.rmtree(path)
    return removed


def hash_folder(folder: Path) -> str:
    """sha256 over relative names and contents of all files, in name order."""
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
