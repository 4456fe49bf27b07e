"""Can the environment be built? The world is set up in a box; an image where Docker runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sandbox.check.episodes import Played
from sandbox.check.findings import Step

_BUILD_ARGUMENTS = ("build", "--quiet", "--network", "none")


def check_build(folder: Path | None, first: Played, build_image: bool, timeout_s: float) -> Step:
    """``first``: an episode that did nothing. ``build_image``: also run `docker build`, offline."""
    step = Step("build")
    if first.stop == "env_error":
        step.add(
            "setup-fails", "tools: setup", f"the world cannot be set up: {first.start_text[:300]}"
        )
    if folder is None or not (folder / "environment" / "Dockerfile").exists():
        step.note = "world set up in a box; no image"
        return step
    if not build_image:
        step.note = "world set up in a box; image not built (--build-image)"
        return step
    docker = shutil.which("docker")
    if docker is None:
        step.skipped, step.note = True, "image not built: docker is not installed"
        return step
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    try:
        done = subprocess.run(
            [docker, *_BUILD_ARGUMENTS, str(folder / "environment")],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        step.add("build-fails", "environment/Dockerfile", f"not built within {timeout_s:g} s")
        return step
    if done.returncode != 0:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "Cannot connect to the Docker daemon" in done.stderr:
            step.skipped, step.note = True, f"image not built: {words}"
        else:
            step.add("build-fails", "environment/Dockerfile", words[:300])
    else:
        step.note = f"image {done.stdout.strip()[:19]}"
    return step
