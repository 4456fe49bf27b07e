"""A task's image on this engine, ready for hardened boxes: built once, named by what it is made of.

``task_image`` resolves the base, builds the Dockerfile, copies the folders that will be writable
into the image (docker_prepare) and reads its ENV, WORKDIR and USER. All of it is cached under a
hash of the build context, the base image's id, the settings and this code.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.owners import process_owner
from sandbox.backends import docker_engine as engine
from sandbox.backends.docker_build import (
    LABEL,
    Context,
    build_image,
    build_lock,
    labels_of,
    local_image,
    read_context,
    reap_builds,
    reap_unused,
)
from sandbox.backends.docker_runtime import Runtime, ensure_runtime, mount
from sandbox.backends.printable import printable
from sandbox.box_image import BoxFolder, BoxImage
from sandbox.config import DockerSection
from sandbox.errors import SandboxLost, TaskError
from sandbox.shell.dockerfile import PATH
from sandbox.shell.rebase import rebased

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "parl-task"
_RECORD = "parl.image"
MAX_SEED_BYTES = 512 << 20
SMALL_BYTES = 64 << 20
"""Largest folder of an image that is made writable though no line of the task names it."""
_PREPARE_S = 300
_CODE = ("docker_build.py", "docker_prepare.py", "docker_task_image.py")


@dataclass(frozen=True, slots=True)
class Recipe:
    """``dockerfile`` with its context folder, or ``image`` by name. ``wanted``: folders that must
    be writable."""

    file: Path
    dockerfile: Path | None
    image: str | None
    wanted: tuple[str, ...]
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class TaskImage:
    """``env`` holds PATH and HOME; ``notes``: what the hardened box does not give the image."""

    image: BoxImage
    env: dict[str, str]
    workdir: str
    notes: tuple[str, ...]


def task_image(client: DockerClient, recipe: Recipe, section: DockerSection) -> TaskImage:
    """BackendUnavailable: a base image is absent; TaskError: the image cannot be built or used;
    SandboxLost: the engine failed."""
    bases: dict[str, str] = {}

    def resolve(name: str) -> str:
        bases[name] = local_image(client, name, section)
        return bases[name]

    if recipe.dockerfile is None:
        assert recipe.image is not None, "a recipe has a Dockerfile or an image"
        key = _key([resolve(recipe.image)], None, recipe)
    else:
        text = _read(recipe.dockerfile)
        context = read_context(recipe.dockerfile.parent)
        rebased(recipe.dockerfile, text, resolve, LABEL)
        key = _key([text, bases], context, recipe)
    tag = f"{REPOSITORY}:{key}"
    found = _record(client, tag)
    if found is None:
        with build_lock():
            found = _record(client, tag)
            if found is None:
                reap_builds(client)
                reap_unused(client, REPOSITORY, section.keep_days)
                found = _make(client, recipe, key, bases, section)
    client.api.tag(tag, REPOSITORY, key)  # its time tells the reaper that the image is in use
    return _image_of(tag, found)


def _make(
    client: DockerClient, recipe: Recipe, key: str, bases: dict[str, str], section: DockerSection
) -> dict[str, Any]:
    """Build where there is a Dockerfile, then prepare; a build that cannot be prepared goes."""
    if recipe.dockerfile is None:
        return _prepare(client, bases[str(recipe.image)], recipe, key)
    plan = rebased(recipe.dockerfile, _read(recipe.dockerfile), bases.__getitem__, labels_of(key))
    image = build_image(
        client,
        read_context(recipe.dockerfile.parent),
        plan,
        key=key,
        file=recipe.dockerfile,
        timeout_s=recipe.timeout_s,
        section=section,
    )
    try:
        return _prepare(client, image, recipe, key)
    except BaseException:
        engine.remove_image(client, image)
        raise


def _key(parts: list[Any], context: Context | None, recipe: Recipe) -> str:
    total = hashlib.sha256()
    for name in _CODE:
        total.update((Path(__file__).parent / name).read_bytes())
    total.update(json.dumps([parts, recipe.wanted], sort_keys=True).encode())
    for name, path in context.entries() if context is not None else ():
        state = path.lstat()
        content = b""
        if path.is_symlink():
            content = str(path.readlink()).encode()
        elif path.is_file():
            content = path.read_bytes()
        entry = [name, state.st_mode & 0o170777, hashlib.sha256(content).hexdigest()]
        total.update(json.dumps(entry).encode())
    return total.hexdigest()[:24]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _record(client: DockerClient, tag: str) -> dict[str, Any] | None:
    """What ``_prepare`` wrote on the image; None when there is no such image."""
    from docker.errors import ImageNotFound

    try:
        labels = client.api.inspect_image(tag)["Config"]["Labels"]
    except ImageNotFound:
        return None
    return json.loads(labels[_RECORD])


def _prepare(client: DockerClient, image: str, recipe: Recipe, key: str) -> dict[str, Any]:
    """Commit the image with its seeds under its tag; the record."""
    from docker.errors import APIError

    config = client.api.inspect_image(image)["Config"]
    workdir = config.get("WorkingDir") or "/"
    volumes = list(config.get("Volumes") or {})
    wanted = [*recipe.wanted, *volumes, *([workdir] if workdir != "/" else [])]
    job = {
        "wanted": wanted,
        "limit_bytes": MAX_SEED_BYTES,
        "small_bytes": SMALL_BYTES,
        "user": config.get("User") or "",
    }
    runtime = ensure_runtime(client)
    try:
        made = client.api.create_container(**_container(client, image, job, runtime))
        try:
            client.api.start(made["Id"])
            done = client.api.wait(made["Id"], timeout=_PREPARE_S)
            said = client.api.logs(made["Id"]).decode("utf-8", "replace").strip()
            if done["StatusCode"] != 0:
                last = printable((said.splitlines() or ["no output"])[-1], most=300)
                raise TaskError(f"{recipe.file}: the image cannot be prepared: {last}")
            record = {**json.loads(said.splitlines()[-1]), "env": config.get("Env") or [],
                      "workdir": workdir}  # fmt: skip
            labels = {LABEL: key, _RECORD: json.dumps(record, sort_keys=True)}
            labels = {**(config.get("Labels") or {}), **labels}
            client.api.commit(
                made["Id"], repository=REPOSITORY, tag=key, conf={**config, "Labels": labels}
            )
        finally:
            engine.remove_container(client, made["Id"])
    except APIError as error:
        raise SandboxLost(
            f"{recipe.file}: the image was not prepared: {error.explanation}"
        ) from error
    return record


def _container(
    client: DockerClient, image: str, job: dict[str, Any], runtime: Runtime
) -> dict[str, Any]:
    """Root of the image, without network and with no more rights than copying files takes."""
    script = (Path(__file__).parent / "docker_prepare.py").read_text(encoding="utf-8")
    box_id = f"prepare-{secrets.token_hex(6)}"
    return {
        "image": image,
        "name": engine.container_name(box_id),
        "user": "0:0",
        "working_dir": "/",
        "entrypoint": [runtime.python, "-I", "-S", "-B", "-c"],
        "command": [script, json.dumps(job)],
        "environment": {"LD_LIBRARY_PATH": runtime.library_path, "LD_PRELOAD": ""},
        "labels": {
            engine.LABEL_BOX: box_id,
            engine.LABEL_OWNER: process_owner(),
            engine.LABEL_EXPIRES: f"{time.time() + 2 * _PREPARE_S:.0f}",
        },
        "host_config": client.api.create_host_config(
            network_mode="none",
            mem_limit="1g",
            memswap_limit="1g",
            pids_limit=16,
            cap_drop=["ALL"],
            cap_add=["CHOWN", "DAC_OVERRIDE", "FOWNER"],
            security_opt=["no-new-privileges:true"],
            ipc_mode="none",
            mounts=[mount(runtime)],
        ),
    }


def _image_of(tag: str, record: dict[str, Any]) -> TaskImage:
    folders = [
        BoxFolder(path, entry["seed"], -(-entry["bytes"] >> 20), entry["files"], entry["mode"])
        for path, entry in record["folders"].items()
    ]
    taken = [folder.path for folder in folders]
    for path in ("/tmp", "/var/tmp", "/run"):
        if path not in taken:
            folders.append(BoxFolder(path, mode=0o1777))
    env = dict(item.partition("=")[::2] for item in record["env"])
    notes = ["the image's system folders (/etc, /usr, /var ...) are read-only"]
    if record["uid"] == 0:
        notes.append("USER root: an unprivileged user of the box's own that reads what root reads")
    elif any(folder.seed for folder in folders):
        notes.append("USER: files of other users in writable folders become its own")
    notes += [f"{text} is read-only: too large to be copied" for text in record["read_only"]]
    return TaskImage(
        BoxImage(
            tag,
            tuple(folders),
            uid=record["uid"] or None,
            gid=record["gid"] if record["uid"] else None,
        ),
        {"PATH": PATH, "HOME": record["home"], "TMPDIR": "/tmp", **env},
        record["workdir"],
        tuple(notes),
    )
