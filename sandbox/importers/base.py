"""What an importer gives back, and writing a task folder from its parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.errors import TaskError
from sandbox.manifest.native import slug
from sandbox.manifest.rendering import render_toml


@dataclass(slots=True)
class Imported:
    """One task folder; ``downgrades``: what the original had and this has not, a line each."""

    folder: Path
    downgrades: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ImportResult:
    """``skipped``: entries that could not become a task, and why."""

    tasks: list[Imported] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def new_folder(dest: Path, name: str) -> Path:
    """``dest/name``, made; TaskError when it exists or cannot be made."""
    folder = dest / slug(name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise TaskError(f"{folder}: exists already; import into a new folder") from error
    except OSError as error:
        raise TaskError(f"{folder}: cannot be made: {error.strerror}") from error
    return folder


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Text files by relative path; scripts become executable."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)


def manifest_text(
    *,
    name: str,
    task_type: str,
    source: str,
    description: str = "",
    keywords: list[str] | None = None,
    timeout_sec: float = 600.0,
    verifier_timeout_sec: float = 60.0,
    parl: dict[str, Any] | None = None,
    root: dict[str, Any] | None = None,
    workdir: str | None = None,
) -> str:
    """task.toml of an imported task with our defaults written out."""
    environment: dict[str, Any] = {"network_mode": "no-network"}
    if workdir is not None:
        environment["workdir"] = workdir
    return render_toml(
        {
            "schema_version": "1.4",
            "source": source,
            **(root or {}),
            "task": {
                "name": name,
                "description": description,
                "keywords": keywords or [],
            },
            "agent": {"timeout_sec": timeout_sec},
            "verifier": {
                "timeout_sec": verifier_timeout_sec,
                "network_mode": "no-network",
                "environment_mode": "separate",
            },
            "environment": environment,
            "metadata": {"parl": {"task_type": task_type, **(parl or {})}},
        }
    )


def read_jsonl(path: Path, skipped: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file; a line that is none goes to ``skipped`` with its
    number. TaskError when the file cannot be read or holds no line."""
    rows: list[tuple[int, dict[str, Any]]] = []
    # not splitlines(): a JSON string may hold U+2028 and other ends of line as they are
    lines = [line for line in enumerate(read_text(path).split("\n"), start=1) if line[1].strip()]
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            skipped.append(f"{path.name}:{number}: not valid JSON: {error}")
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            skipped.append(f"{path.name}:{number}: expected a JSON object, found {line[:60]}")
    if not lines:
        raise TaskError(f"{path}: holds no row")
    return rows


def read_text(path: Path) -> str:
    """UTF-8 text; TaskError names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8 text (byte {error.start})") from error
