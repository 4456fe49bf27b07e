"""Folders that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from engine.errors import CheckpointError


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder to write into; its files move into ``target`` when the block ends well.

    When it does not, all that was made is removed, the folders above ``target`` included, and what
    the disk says becomes a CheckpointError. config.json moves last: a folder without it is not a
    model yet.
    """
    made = _missing(target)
    moved: list[Path] = []
    inside: Path | None = None
    try:
        target.mkdir(parents=True, exist_ok=True)
        # inside, not beside: a mounted target lies on another disk than its parent
        inside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target))
        yield inside
        for path in sorted(inside.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(target / path.name)
            moved.append(target / path.name)
        inside.rmdir()
    except BaseException as error:
        _remove(inside, moved, made)
        if isinstance(error, OSError | SafetensorError):
            cause = (isinstance(error, OSError) and error.strerror) or str(error)
            raise CheckpointError(
                f"{target}: {cause}; nothing was kept; expected a new or empty folder that we may "
                "write, on a disk with room"
            ) from error
        raise


def _missing(target: Path) -> list[Path]:
    """Folders that ``mkdir`` will make, innermost first."""
    missing = []
    for path in (target, *target.parents):
        with suppress(OSError):
            if path.exists():
                break
        missing.append(path)
    return missing


def _remove(inside: Path | None, moved: list[Path], made: list[Path]) -> None:
    if inside is not None:
        shutil.rmtree(inside, ignore_errors=True)
    for path in moved:
        path.unlink(missing_ok=True)
    for path in made:
        with suppress(OSError):  # never made, or somebody else has put a file there
            path.rmdir()
