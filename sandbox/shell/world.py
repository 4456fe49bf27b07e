"""A plain Harbor folder (tests/test.sh, no tools/) -> sources and data of a shell world."""

from __future__ import annotations

import base64
import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sandbox.box_image import BoxImage
from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest
from sandbox.shell.dockerfile import Recipe, read_recipe

BUNDLE_NAME = "shell"
"""One name for every folder, so that all of them share a pool."""
ROOTS = ("app", "tests", "solution", "logs")
MAX_BYTES = 4 << 20
_NEEDS_RUNNER = re.compile(r"(?m)^[^#\n]*\b(m?pytest|uvx?|pip3?|apt-get|curl)\b")
_MKDIR = re.compile(r"\bmkdir\s+([^;&|<>]+)")
_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp"}
    | {"usr", "var", "box"}
)


@dataclass(frozen=True, slots=True)
class ShellWorld:
    """``environment`` goes into the agent's box, ``verifier`` into the verifier's; the images are
    what these boxes are made of, where they are containers of the task's own images."""

    environment: dict[str, Any]
    verifier: dict[str, Any]
    notes: tuple[str, ...]
    image: BoxImage | None = None
    verifier_image: BoxImage | None = None


MakeWorld = Callable[[Path, Manifest, float], ShellWorld]
"""(task folder, its manifest, seconds of a call)"""


def shell_sources() -> tuple[str, str]:
    """Texts of tools.py and verify.py."""
    here = Path(__file__).parent
    return (
        (here / "tools.py").read_text(encoding="utf-8"),
        (here / "verify.py").read_text(encoding="utf-8"),
    )


def shell_world(folder: Path, manifest: Manifest, call_timeout_s: float) -> ShellWorld:
    """TaskError for a file that leads out of the folder or more than 4 MiB of them."""
    recipe = Recipe()
    dockerfile = folder / "environment" / "Dockerfile"
    notes: list[str] = []
    if dockerfile.exists():
        recipe = read_recipe(dockerfile)
    elif manifest.environment.docker_image is not None:
        notes.append(
            f"image {manifest.environment.docker_image} is not used: the box has this machine's "
            "/usr (bash, coreutils, Python)"
        )
    if any((folder / "environment").glob("*compose.y*ml")):
        notes.append("environment: the services of docker compose are not started")
    cwd = manifest.environment.workdir or recipe.workdir
    targets = [cwd, *(target for _, target in recipe.copies), *_named_folders(recipe)]
    roots = list(dict.fromkeys([*ROOTS, *(target.strip("/").split("/")[0] for target in targets)]))
    for root in roots:
        if root in _SYSTEM or not root:
            raise TaskError(
                f"{dockerfile}: writes to /{root}, which is read-only in a box; copy to /app "
                "or another folder of the task's own"
            )
    artifacts = declared_artifacts(manifest) or [cwd]
    shared: dict[str, Any] = {"roots": roots, "cwd": cwd, "artifacts": artifacts}
    shared |= {"files": _copied(folder / "environment", recipe), "run": recipe.run}
    environment = {
        **shared,
        "env": {**recipe.env, **manifest.environment.env},
        "call_timeout_s": max(1.0, call_timeout_s - 1.0),
    }
    verifier = {
        **shared,
        "tests": packed(folder / "tests", folder),
        "env": {**recipe.env, **manifest.verifier.env},
        "timeout_s": max(1.0, manifest.verifier.timeout_sec - 1.0),
    }
    if (runner := runner_for(folder)) is not None:
        verifier["runner"] = runner
        notes.append(
            "tests/test.sh: nothing is installed at verification; pytest is PARL's small runner "
            "(sandbox.shell.runner)"
        )
    return ShellWorld(environment, verifier, (*notes, *recipe.notes))


def _named_folders(recipe: Recipe) -> list[str]:
    """The task's own folders that variables hold and mkdir makes."""
    values = [part for value in recipe.env.values() for part in value.split(":")]
    for command in recipe.run:
        for words in _MKDIR.findall(command):
            values += words.split()
    return [place for place in values if place.startswith("/") and not is_system(place)]


def runner_for(folder: Path) -> str | None:
    """Text of the runner that stands in for pytest, if tests/test.sh installs or runs it."""
    script = (folder / "tests" / "test.sh").read_text("utf-8", "replace")
    if not _NEEDS_RUNNER.search(script):
        return None
    return (Path(__file__).parent / "runner.py").read_text(encoding="utf-8")


def declared_artifacts(manifest: Manifest) -> list[str]:
    """Absolute paths whose content reaches the verifier; TaskError for another kind of entry."""
    return [_source_of(item) for item in manifest.artifacts]


def is_system(path: str) -> bool:
    """Whether an absolute path is the operating system's, not the task's."""
    first = path.strip("/").split("/")[0]
    return not first or first in _SYSTEM


def packed(part: Path, folder: Path) -> dict[str, Any]:
    """Files below ``part`` as {relative path: {base64, mode}}."""
    files: dict[str, Any] = {}
    total = 0
    for path in sorted(part.rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TaskError(
                f"{path}: leads out of the task folder, to {path.resolve()}; copy the file"
            )
        content = path.read_bytes()
        total += len(content)
        if total > MAX_BYTES:
            raise TaskError(f"{part}: more than {MAX_BYTES >> 20} MiB of files for one box")
        files[str(path.relative_to(part))] = {
            "base64": base64.b64encode(content).decode(),
            "mode": path.stat().st_mode & 0o777,
        }
    return files


def _copied(context: Path, recipe: Recipe) -> dict[str, Any]:
    """Absolute path in the world -> file, following COPY's rules for files and folders."""
    available = packed(context, context.parent) if context.is_dir() else {}
    result: dict[str, Any] = {}
    for source, target in recipe.copies:
        wanted = str(PurePosixPath(source.lstrip("/"))).removeprefix("./")
        matches = [
            name
            for name in available
            if wanted == "." or fnmatch.fnmatch(name, wanted) or name.startswith(wanted + "/")
        ]
        if not matches:
            raise TaskError(
                f"{context / 'Dockerfile'}: COPY {source}: no such file in {context}; the build "
                "context is environment/"
            )
        for name in matches:
            if wanted == ".":
                place = PurePosixPath(target) / name
            elif name.startswith(wanted + "/"):
                place = PurePosixPath(target) / name.removeprefix(wanted + "/")
            elif target.endswith("/"):
                place = PurePosixPath(target) / PurePosixPath(name).name
            else:
                place = PurePosixPath(target)
            if str(place.name) != "Dockerfile":
                result[str(place)] = available[name]
    return result


def _source_of(artifact: str | dict[str, Any]) -> str:
    path = artifact if isinstance(artifact, str) else artifact.get("source")
    if not isinstance(path, str) or not path.startswith("/"):
        raise TaskError(f"task.toml: artifacts: {artifact!r}: expected an absolute path")
    return path
