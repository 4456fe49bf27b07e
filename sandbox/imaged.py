"""Plain Harbor tasks in their own images, where the backend is docker (facts/sandboxes.md 1.1).

``load_for(folder, config)`` is ``load_task`` for the boxes that ``config`` opens: at level docker
the image of a plain task is built or found, and agent, solution and verifier run in it; at any
other level the notes say what the task loses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.backends.docker_engine import connected
from sandbox.backends.docker_task_image import Recipe, TaskImage, task_image
from sandbox.config import DockerSection, SandboxConfig
from sandbox.errors import BackendUnavailable, TaskError
from sandbox.manifest.harbor import Manifest
from sandbox.manifest.reading import read_toml
from sandbox.shell.rebase import copied_roots
from sandbox.shell.world import (
    ShellWorld,
    declared_artifacts,
    is_system,
    packed,
    runner_for,
)
from sandbox.task import LoadedTask, load_task

if TYPE_CHECKING:
    from docker import DockerClient

ROOTS = ("/app", "/tests", "/solution", "/logs")
LOGS = ("/logs/agent", "/logs/artifacts")
"""Reach the verifier as Harbor's runners do it, declared or not."""
MEMORY_MIB = 1024
DISK_MIB = 256
"""Of a box whose task names no sizes."""
# notes of sandbox.manifest.native that do not hold for an image
NO_NETWORK = "environment: the network is off in a box"
VERIFIER_IMAGE = "verifier.environment: its image is not used"


def load_for(folder: Path, config: SandboxConfig) -> LoadedTask:
    """The errors of ``load_task``; for an image also BackendUnavailable (no engine, a base image is
    absent), TaskError (it cannot be built) and SandboxLost (the engine failed)."""
    if config.level != "docker" or not has_image(folder):
        return load_task(folder)
    loaded = load_task(folder, make_world=partial(image_world, config=config))
    spec = loaded.spec
    sizes = replace(
        spec.environment,
        memory_mib=spec.environment.memory_mib or max(MEMORY_MIB, config.memory_mib),
        disk_mib=spec.environment.disk_mib or max(DISK_MIB, config.disk_mib),
    )
    image = loaded.bundle.image
    dropped = {VERIFIER_IMAGE, NO_NETWORK if image is not None and image.network else ""}
    notes = tuple(note for note in loaded.notes if note not in dropped)
    return replace(loaded, spec=replace(spec, environment=sizes), notes=notes)


def has_image(folder: Path) -> bool:
    """Whether a plain task (no tools/tools.py) brings a Dockerfile or names an image."""
    if (folder / "tools" / "tools.py").exists() or not (folder / "tests" / "test.sh").exists():
        return False
    if (folder / "environment" / "Dockerfile").exists():
        return True
    return _environment(folder).get("docker_image") is not None


def image_world(
    folder: Path, manifest: Manifest, call_timeout_s: float, *, config: SandboxConfig
) -> ShellWorld:
    """The shell world inside the task's images."""
    with connected() as client:
        agent, notes = _agent_image(client, folder, manifest, config.docker)
        judge = _verifier_recipe(folder, manifest, agent.workdir, config.docker)
        verifier = agent if judge is None else task_image(client, judge, config.docker)
    notes += agent.notes
    if any((folder / "environment").glob("*compose.y*ml")):
        notes.append("environment: the services of docker compose are not started")
    image = agent.image
    if config.docker.allow_network and wants_network(folder):
        image = replace(image, network=True)
    cwd = _workdir(manifest, agent)
    artifacts = [*(declared_artifacts(manifest) or [cwd]), *LOGS]
    shared: dict[str, Any] = {"base": "/", "roots": [], "artifacts": artifacts}
    environment = {
        **shared,
        "cwd": cwd,
        "files": {},
        "run": [],
        "env": {**agent.env, **manifest.environment.env},
        "call_timeout_s": max(1.0, call_timeout_s - 1.0),
    }
    judging = {
        **shared,
        "cwd": _workdir(manifest, verifier),
        "tests": packed(folder / "tests", folder),
        "env": {**verifier.env, **manifest.verifier.env},
        "timeout_s": max(1.0, manifest.verifier.timeout_sec - 1.0),
    }
    if (runner := runner_for(folder)) is not None:
        judging["runner"] = runner
        notes.append(
            "tests/test.sh: nothing is installed at verification; pytest is the image's own, or "
            "else PARL's small runner (sandbox.shell.runner)"
        )
    return ShellWorld(environment, judging, tuple(notes), image, verifier.image)


def wants_network(folder: Path) -> bool:
    """Whether the task says itself that it needs the public network."""
    environment = _environment(folder)
    return environment.get("network_mode") == "public" or bool(environment.get("allow_internet"))


def _environment(folder: Path) -> dict[str, Any]:
    found = read_toml(folder / "task.toml").get("environment", {})
    return found if isinstance(found, dict) else {}


def _agent_image(
    client: DockerClient, folder: Path, manifest: Manifest, section: DockerSection
) -> tuple[TaskImage, list[str]]:
    """As Harbor chooses: an image that is named wins over a Dockerfile, if it is there at all."""
    dockerfile = folder / "environment" / "Dockerfile"
    image = manifest.environment.docker_image
    found = dockerfile if dockerfile.exists() else None
    notes: list[str] = []
    if image is not None:
        recipe = _with_folders(manifest, found, image, folder / "task.toml", section)
        try:
            return task_image(client, replace(recipe, dockerfile=None), section), notes
        except BackendUnavailable:
            if found is None:
                raise
            notes.append(f"docker_image {image} is not on this engine: its Dockerfile is built")
    recipe = _with_folders(manifest, found, None, folder / "task.toml", section)
    return task_image(client, recipe, section), notes


def _verifier_recipe(
    folder: Path, manifest: Manifest, workdir: str, docker: DockerSection
) -> Recipe | None:
    """tests/Dockerfile or ``verifier.environment.docker_image``; None = the agent's image."""
    dockerfile = folder / "tests" / "Dockerfile"
    section = read_toml(folder / "task.toml").get("verifier", {}).get("environment") or {}
    image = section.get("docker_image")
    if not dockerfile.exists() and image is None:
        return None
    found = dockerfile if image is None else None
    recipe = _with_folders(manifest, found, image, folder / "task.toml", docker)
    places = {*recipe.wanted, workdir} - {"/"}
    return replace(recipe, wanted=tuple(sorted(places)))


def _with_folders(
    manifest: Manifest,
    dockerfile: Path | None,
    image: str | None,
    file: Path,
    section: DockerSection,
) -> Recipe:
    """The folders that the task's own lines name are writable."""
    wanted = [*ROOTS, *section.writable]
    named = [manifest.environment.workdir, *declared_artifacts(manifest)]
    if dockerfile is not None:
        try:
            named += copied_roots(dockerfile.read_text(encoding="utf-8"), dockerfile)
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{dockerfile}: cannot be read as UTF-8 text: {error}") from error
    for place in named:
        if place and not is_system(place):
            wanted.append("/" + place.strip("/").split("/")[0])
        elif place and place == manifest.environment.workdir and place != "/":
            wanted.append(place)
    return Recipe(
        file=dockerfile or file,
        dockerfile=dockerfile,
        image=image,
        wanted=tuple(sorted(set(wanted))),
        timeout_s=manifest.environment.build_timeout_sec,
    )


def _workdir(manifest: Manifest, image: TaskImage) -> str:
    """The root of a file system is no place to work in: /app then."""
    found = manifest.environment.workdir or image.workdir
    return "/app" if found == "/" else found
