"""BoxImage: the image of a task, ready to be run hardened: which folders may be written, as whom.

A hardened container's root is read-only. Folders of the task are memory file systems instead, each
with a size, filled at every start from a copy (``SEEDS``) that lies in the image itself.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from sandbox.tool_spec import STRICT

SEEDS = "/.parl-seed"
"""Where the copies are, numbered; read-only."""
RUNTIME = "/.parl"
"""Where PARL's own Python is mounted, read-only: an image needs none."""


@dataclass(frozen=True, config=STRICT)
class BoxFolder:
    """``seed``: name below SEEDS, or None for a folder that starts empty; sizes are the seed's."""

    path: str
    seed: str | None = None
    size_mib: int = 0
    num_files: int = 0
    mode: int = 0o755


@dataclass(frozen=True, config=STRICT)
class BoxImage:
    """``reference`` names it on the engine, by the hash of what it was built from. ``uid`` None: a
    uid of the box's own; ``network``: a bridge instead of none."""

    reference: str
    folders: tuple[BoxFolder, ...]
    uid: int | None = None
    gid: int | None = None
    network: bool = False

    @property
    def seed_mib(self) -> int:
        """Memory that the filled folders take before anything ran."""
        return sum(folder.size_mib for folder in self.folders)

    @property
    def largest_mib(self) -> int:
        """Of one folder."""
        return max((folder.size_mib for folder in self.folders), default=0)
