"""Which boxes a ``parl task`` command opens: a backend by name, and images that stand for bases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.errors import ConfigError

if TYPE_CHECKING:
    from sandbox.config import SandboxConfig

Backend = Annotated[
    str,
    typer.Option("--backend", "--level", help="auto, A, B, docker (the task's own image) or ray."),
]
BaseImages = Annotated[
    list[str] | None,
    typer.Option(
        "--base-image",
        metavar="NAME=LOCAL",
        help="docker: a local image for one that a Dockerfile names; may be repeated.",
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option("--sandbox", metavar="FILE", help="TOML with sandbox settings (docs/tasks.md)."),
]
_DOCKER = {"max_processes": 256, "max_open_files": 1024}
"""Images run whole programs, not only tools of ours; the task names memory and disk."""


def boxes(
    backend: str, base_images: list[str] | None = None, file: Path | None = None
) -> SandboxConfig:
    """ConfigError in one line for an unknown backend, a base image that is no pair or a bad file;
    the command line wins over the file."""
    from pydantic import ValidationError

    from sandbox.config import SandboxConfig

    settings: dict[str, Any] = {**_DOCKER} if backend == "docker" else {}
    settings |= _read(file) if file is not None else {}
    if backend != "auto" or "level" not in settings:
        settings["level"] = backend
    if base_images:
        _check_builds(settings["level"], base_images[0])
        docker = dict(settings.get("docker", {}))
        docker["base_images"] = {**docker.get("base_images", {}), **_pairs(base_images)}
        settings["docker"] = docker
    try:
        return SandboxConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        told = "--backend" if key == "level" else key
        raise ConfigError(f"{told} {first['input']!r}: {first['msg']}") from error


def _check_builds(level: str, base_image: str) -> None:
    if level not in ("docker", "ray"):
        raise ConfigError(
            f"--base-image {base_image!r} with --backend {level}: only docker builds images; add "
            "--backend docker"
        )


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, found, local = text.partition("=")
        if not (name and found and local):
            raise ConfigError(f"--base-image {text!r}: expected NAME=LOCAL")
        pairs[name] = local
    return pairs


def _read(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--sandbox {file}: {error}") from error
