"""FolderFamily: a task folder, or a folder of them, as a family that rounds draw from.

``tasks.family = "folder:PATH"``. One run has one kind of box, so all tasks below PATH must share
their code: the same tools.py and verify.py, or all plain Harbor tasks (the shell world; at level
docker with one image).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from sandbox.catalog.base import Oracle, Split
from sandbox.check.scripts import Script, oracle_of
from sandbox.check.subject import largest
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.imaged import load_for
from sandbox.task import TaskSpec, ToolBundle

PREFIX = "folder:"
HELDOUT_SHARE = 5
"""One task in so many of a type is held out; fewer tasks than this serve both splits."""


class FolderFamily:
    """Implements ``sandbox.catalog.base.Family``. Boxes are as large as the largest task asks."""

    def __init__(self, root: Path, config: SandboxConfig | None = None) -> None:
        """TaskError when there is no task, or the tasks need different code. ``config``: the boxes
        that will play them (sandbox.imaged)."""
        self.root = root
        self.folders = tuple(task_folders(root))
        boxes = config or SandboxConfig()
        loaded = [load_for(folder, boxes) for folder in self.folders]
        first = loaded[0].bundle
        self.bundle: ToolBundle = replace(first, name=f"{PREFIX}{root.resolve().name}")
        for folder, task in zip(self.folders, loaded, strict=True):
            if replace(task.bundle, name=self.bundle.name).hash != self.bundle.hash:
                raise TaskError(
                    f"{folder}: its tools.py, verify.py, packages or image differ from those of "
                    f"{self.folders[0]}; one run takes tasks that share their code"
                )
        self.environment = largest([task.spec.environment for task in loaded])
        self._specs = [self._fit(task.spec) for task in loaded]
        self._folder_of = {
            spec.name: folder for spec, folder in zip(self._specs, self.folders, strict=True)
        }
        self.name = f"{PREFIX}{root}"
        self.task_types = tuple(dict.fromkeys(spec.task_type for spec in self._specs))

    def _fit(self, spec: TaskSpec) -> TaskSpec:
        sizes = replace(self.environment, data=spec.environment.data)
        return replace(spec, bundle=self.bundle.hash, environment=sizes)

    def instance(self, seed: int, index: int, split: Split, task_type: str) -> TaskSpec:
        """Task ``index`` of the split in an order shuffled by (seed, pass over the tasks)."""
        tasks = self._of(split, task_type)
        turn, place = divmod(index, len(tasks))
        ordered = sorted(tasks, key=lambda spec: _draw(f"{seed}|{turn}|{spec.name}"))
        return ordered[place]

    def folder(self, spec: TaskSpec) -> Path:
        """Where one of this family's tasks lies."""
        return self._folder_of[spec.name]

    def oracle(self, spec: TaskSpec) -> Oracle:
        """The author's solution."""
        script: Script = oracle_of(self._folder_of[spec.name], spec)
        return Oracle(script.rounds, script.final_text)

    def _of(self, split: Split, task_type: str) -> list[TaskSpec]:
        mine = [spec for spec in self._specs if spec.task_type == task_type]
        if not mine:
            raise TaskError(
                f"{self.name} has no task type {task_type!r}; known: {', '.join(self.task_types)}"
            )
        if len(mine) < HELDOUT_SHARE:
            return mine
        ordered = sorted(mine, key=lambda spec: _draw(spec.name))
        num_held = len(mine) // HELDOUT_SHARE
        return ordered[:num_held] if split == "heldout" else ordered[num_held:]


def task_folders(root: Path) -> list[Path]:
    """``root`` itself or the task folders directly below it, sorted; TaskError when none."""
    if (root / "task.toml").is_file():
        return [root]
    found = sorted(path.parent for path in root.glob("*/task.toml"))
    if not found:
        raise TaskError(
            f"{root}: no task.toml here or one folder below; `parl task new` makes a task folder"
        )
    return found


def _draw(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
