"""Harbor 1.0 to 1.4 folders -> our stricter ones; shipped families -> Harbor folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from sandbox.catalog.registry import get_family, list_families
from sandbox.check.folder_family import task_folders
from sandbox.errors import TaskError
from sandbox.importers.base import Imported, ImportResult
from sandbox.manifest.native import is_native, load_native
from sandbox.manifest.rendering import render_manifest
from sandbox.task import TaskSpec, load_task


def import_harbor(source: Path, dest: Path, limit: int) -> ImportResult:
    """``source``: a task folder or a folder of them. TaskError when there is none."""
    result = ImportResult()
    folders = task_folders(source)
    for folder in folders[: limit or None]:
        target = dest / folder.resolve().name if len(folders) > 1 else dest
        try:
            result.tasks.append(_import(folder, target))
        except TaskError as error:
            result.skipped.append(str(error))
            shutil.rmtree(target, ignore_errors=True)
    return result


def _import(folder: Path, target: Path) -> Imported:
    """The same files with a task.toml of version 1.4 that says what holds here."""
    if target.exists():
        raise TaskError(f"{target}: exists already; import into a new folder")
    notes: tuple[str, ...] = ()
    shutil.copytree(folder, target, symlinks=True, ignore=shutil.ignore_patterns(".parl", ".git"))
    if is_native(folder / "task.toml"):
        manifest, notes = load_native(folder / "task.toml")
        manifest = manifest.model_copy(update={"schema_version": "1.4"})
        (target / "task.toml").write_text(render_manifest(manifest), encoding="utf-8")
    return Imported(target, list(dict.fromkeys([*notes, *load_task(target).notes])))


@runtime_checkable
class ExportingFamily(Protocol):
    """A family that writes its instances as folders."""

    def instance(self, seed: int, index: int, split: str, task_type: str) -> TaskSpec: ...

    def export(self, spec: TaskSpec, folder: Path) -> None: ...


def export_family(reference: str, seed: int, index: int, dest: Path) -> bool:
    """Write instance ``index`` of ``family/type``; False when the reference is no shipped family.

    TaskError when the family cannot export or ``dest`` exists.
    """
    name, _, task_type = reference.partition("/")
    if name not in list_families():
        return False
    family = get_family(name)
    if not isinstance(family, ExportingFamily):
        raise TaskError(f"family {name} does not write Harbor folders")
    if task_type not in family.task_types:
        raise TaskError(f"{name} has no task type {task_type!r}; known: "
                        f"{', '.join(family.task_types)}")  # fmt: skip
    if dest.exists():
        raise TaskError(f"{dest}: exists already; choose another place")
    family.export(family.instance(seed, index, "train", task_type), dest)
    return True
