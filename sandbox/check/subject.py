"""What is checked: a task folder, or instances of a shipped family."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox.calls.table import ToolTable
from sandbox.catalog.base import Family
from sandbox.check.scripts import Script, attacks_of, oracle_of
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.imaged import load_for
from sandbox.task import EnvironmentSpec, TaskSpec, ToolBundle

OWN_FOLDER = ".parl"
"""Written by PARL into a task folder (its certificate); no part of the content."""
IGNORED = frozenset({OWN_FOLDER, "__pycache__", ".git", ".DS_Store", ".pytest_cache"})
MAX_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Case:
    """One instance and its solution."""

    spec: TaskSpec
    oracle: Script


@dataclass(frozen=True, slots=True)
class Subject:
    """``folder`` None for a shipped family. ``cases`` share ``bundle``."""

    target: str
    name: str
    version: str
    content_hash: str
    bundle: ToolBundle
    cases: tuple[Case, ...]
    attacks: tuple[Script, ...] = ()
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def folder_subject(folder: Path, config: SandboxConfig | None = None) -> Subject:
    """TaskError (one line) when the folder cannot be loaded, built or has no solution. ``config``:
    the boxes it is for (sandbox.imaged)."""
    loaded = load_for(folder, config or SandboxConfig())
    ToolTable(loaded.spec.tools, loaded.spec.forbidden_tools)  # refuses two tools of one name
    return Subject(
        target=str(folder),
        name=loaded.spec.name,
        version=loaded.manifest.task.version or "",
        content_hash=content_hash(folder),
        bundle=loaded.bundle,
        cases=(Case(loaded.spec, oracle_of(folder, loaded.spec)),),
        attacks=tuple(attacks_of(folder, loaded.spec)),
        folder=folder,
        notes=loaded.notes,
    )


def family_subject(family: Family, task_type: str | None, num_instances: int) -> Subject:
    """Instances 0..n-1 (training split) and 0 (held-out) of every type or of one."""
    types = family.task_types if task_type is None else (task_type,)
    cases = []
    for kind in types:
        for split, count in (("train", num_instances), ("heldout", 1)):
            for index in range(count):
                spec = family.instance(0, index, split, kind)  # pyright: ignore[reportArgumentType]
                oracle = family.oracle(spec)
                cases.append(Case(spec, Script("oracle", oracle.rounds, oracle.final_text)))
    # one pool plays all of them: its boxes are as large as the largest asks
    sizes = largest([case.spec.environment for case in cases])
    cases = [
        replace(
            case,
            spec=replace(case.spec, environment=replace(sizes, data=case.spec.environment.data)),
        )
        for case in cases
    ]
    target = family.name if task_type is None else f"{family.name}/{task_type}"
    ids = [family.bundle.hash, *(case.spec.content_hash for case in cases)]
    return Subject(
        target=target,
        name=target,
        version="",
        content_hash=hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        bundle=family.bundle,
        cases=tuple(cases),
    )


def largest(sizes: list[EnvironmentSpec]) -> EnvironmentSpec:
    """The largest memory, disk and cpu share that any of them asks for."""
    memory = [size.memory_mib for size in sizes if size.memory_mib is not None]
    disk = [size.disk_mib for size in sizes if size.disk_mib is not None]
    cpus = [size.cpus for size in sizes if size.cpus is not None]
    return EnvironmentSpec(
        memory_mib=max(memory, default=None),
        disk_mib=max(disk, default=None),
        cpus=max(cpus, default=None),
    )


def content_files(folder: Path) -> list[Path]:
    """Every file of the task, sorted by relative path; TaskError for more than MAX_FILES."""
    found: list[Path] = []
    for path in folder.rglob("*"):
        if IGNORED.intersection(path.relative_to(folder).parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink() or not path.is_dir():
            found.append(path)
        if len(found) > MAX_FILES:
            raise TaskError(f"{folder}: more than {MAX_FILES} files; this is no task folder")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def special_files(folder: Path) -> list[Path]:
    """Pipes, sockets and devices: reading one may never end."""
    return [
        path
        for path in content_files(folder)
        if not stat.S_ISREG(path.lstat().st_mode) and not path.is_symlink()
    ]


def content_hash(folder: Path) -> str:
    """sha256 over path, executable bit and content of every file; a link counts as its target."""
    total = hashlib.sha256()
    for path in content_files(folder):
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            kind, content = "link", str(path.readlink()).encode()
        elif stat.S_ISREG(state.st_mode):
            kind, content = ("exec" if state.st_mode & 0o100 else "file"), path.read_bytes()
        else:
            raise TaskError(
                f"{path}: neither file, folder nor link; a task folder holds only those"
            )
        entry = [path.relative_to(folder).as_posix(), kind, hashlib.sha256(content).hexdigest()]
        total.update(json.dumps(entry).encode() + b"\n")
    return total.hexdigest()
