"""From what a client asks for to a task instance and its code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sandbox.catalog.base import Family
from sandbox.catalog.registry import get_family, list_families
from sandbox.check.certificate import require_certificate
from sandbox.check.subject import content_hash
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.imaged import load_for
from sandbox.server.errors import NotFound
from sandbox.server.wire import FamilyTask, FolderTask
from sandbox.task import TaskSpec, ToolBundle


class TaskSource:
    """Blocking (files are read, documents are drawn): call it in a thread."""

    def __init__(
        self, roots: Sequence[Path], allow_uncertified: bool, boxes: SandboxConfig
    ) -> None:
        """TaskError when a root is not a folder. ``boxes`` will play the tasks (sandbox.imaged)."""
        for root in roots:
            if not root.is_dir():
                raise TaskError(f"task root {root}: no such folder; expected one with task folders")
        self._roots = tuple(root.resolve() for root in roots)
        self._allow_uncertified = allow_uncertified
        self._boxes = boxes

    def find(self, task: FamilyTask | FolderTask) -> tuple[TaskSpec, ToolBundle]:
        """NotFound when there is no such task; TaskError when its folder is not valid or not
        certified."""
        return self._folder(task) if isinstance(task, FolderTask) else _instance(task)

    def _folder(self, task: FolderTask) -> tuple[TaskSpec, ToolBundle]:
        for root in self._roots:
            folder = root / task.folder
            if not (folder / "task.toml").is_file():
                continue
            if not folder.resolve().is_relative_to(root):
                raise TaskError(f"task folder {task.folder!r}: a link that leaves {root}; copy it")
            if self._allow_uncertified:
                loaded = load_for(folder, self._boxes)
            else:
                certificate = require_certificate(folder)
                loaded = load_for(folder, self._boxes)
                # what was loaded is what was certified, also when somebody writes meanwhile
                if content_hash(folder) != certificate.content_hash:
                    raise TaskError(f"{folder}: changed while it was loaded; check the task again")
            return loaded.spec, loaded.bundle
        roots = ", ".join(map(str, self._roots)) or "none (--tasks)"
        raise NotFound(f"no task folder {task.folder!r}; task roots: {roots}")


def _instance(task: FamilyTask) -> tuple[TaskSpec, ToolBundle]:
    if task.family not in list_families():
        raise NotFound(f"no family {task.family!r}; known: {', '.join(list_families())}")
    family = _family(task.family)
    if task.task_type not in family.task_types:
        raise NotFound(
            f"family {task.family} has no type {task.task_type!r}; known: "
            f"{', '.join(family.task_types)}"
        )
    spec = family.instance(task.seed, task.index, task.split, task.task_type)
    return spec, family.bundle


@cache
def _family(name: str) -> Family:
    return get_family(name)
