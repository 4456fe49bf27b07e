"""Builds an image from a Dockerfile on the local engine: no network, no pull, nothing left behind.

The classic builder over the SDK. Every layer and every container of a build carries LABEL with the
build's key, so what a failed or killed build leaves is found and removed by it.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.backends import docker_engine as engine
from sandbox.backends.printable import printable
from sandbox.config import DockerSection
from sandbox.errors import BackendUnavailable, SandboxLost, TaskError
from sandbox.shell.rebase import Rebased, shown

if TYPE_CHECKING:
    from docker import DockerClient

LABEL = "parl.task"
LABEL_USER = "parl.task.user"
"""uid of who builds."""
MAX_CONTEXT_BYTES = 1 << 30
_STEP = re.compile(r"^Step (\d+)/\d+ : ")
_CODE = re.compile(r"returned a non-zero code: (\d+)")
_NO_NETWORK = re.compile(
    r"(?i)temporary failure (in name resolution|resolving)|could not resolve|network is unreachable"
    r"|name or service not known|failed to (fetch|establish a new connection)|getaddrinfo|ENOTFOUND"
    r"|no address associated|connection (error|broken)|bad address"
)
_HOUR_S = 3600.0
_KILL_EVERY_S = 0.3


@dataclass(frozen=True, slots=True)
class Context:
    """A build context on disk: what of ``folder`` its .dockerignore leaves in, sorted."""

    folder: Path
    names: tuple[str, ...]

    def entries(self) -> Iterator[tuple[str, Path]]:
        for name in self.names:
            yield name, self.folder / name


def read_context(folder: Path) -> Context:
    """TaskError for more than a GiB, for a pipe or device, or a link out of the folder."""
    from docker.utils.build import exclude_paths

    ignore = folder / ".dockerignore"
    patterns = ignore.read_text("utf-8").splitlines() if ignore.is_file() else []
    patterns = [line.strip() for line in patterns if line.strip() and not line.startswith("#")]
    names = sorted(name for name in exclude_paths(str(folder), patterns) if name)
    total = 0
    for name in names:
        path = folder / name
        if path.is_symlink():
            if not path.resolve().is_relative_to(folder.resolve()):
                raise TaskError(f"{path}: leads out of the task folder; copy the file")
        elif not path.is_file() and not path.is_dir():
            raise TaskError(f"{path}: neither file, folder nor link; it cannot be built from")
        total += path.lstat().st_size
    if total > MAX_CONTEXT_BYTES:
        raise TaskError(f"{folder}: {total >> 20} MiB to build from; at most 1024 MiB")
    return Context(folder, tuple(names))


def local_image(client: DockerClient, name: str, section: DockerSection) -> str:
    """Id of the local image that stands for ``name``; BackendUnavailable when there is none."""
    from docker.errors import APIError

    mapped = {_full(key): value for key, value in section.base_images.items()}
    local = mapped.get(_full(name), name)
    try:
        found = client.images.get(local)
    except APIError as error:
        if error.status_code not in (400, 404):
            raise
        said = f"image {name!r}" + (f", mapped to {local!r}," if local != name else "")
        raise BackendUnavailable(
            f"docker: {said} is not on this engine and nothing is pulled: `docker load` it, or "
            f'name a local one for it: docker.base_images = {{ "{name}" = "LOCAL" }} (parl task: '
            f"--base-image {name}=LOCAL)"
        ) from None
    assert found.id is not None, "the engine knows images by id"
    return found.id


def _full(name: str) -> str:
    """One spelling of an image's name: no default registry, a tag."""
    plain = re.sub(r"^(docker\.io/)?(library/)?", "", name)
    return plain if "@" in plain or ":" in plain.rpartition("/")[2] else f"{plain}:latest"


def build_image(
    client: DockerClient,
    context: Context,
    rebased: Rebased,
    *,
    key: str,
    file: Path,
    timeout_s: float,
    section: DockerSection,
) -> str:
    """Id of the image, labelled ``LABEL=key``. TaskError in one line for a step that fails or takes
    too long, SandboxLost when the engine does."""
    from docker.errors import APIError, DockerException

    memory = section.build_memory_mib << 20
    late, ended = threading.Event(), threading.Event()

    def watch() -> None:
        if ended.wait(timeout_s):
            return
        late.set()
        while not ended.wait(_KILL_EVERY_S):  # the step may not have its container yet
            _end_build(client, key)

    threading.Thread(target=watch, daemon=True, name="build-deadline").start()
    done = ""
    try:
        events = client.api.build(
            fileobj=_tar(context, rebased.text),
            custom_context=True,
            dockerfile=_DOCKERFILE,
            network_mode="none",
            pull=False,
            rm=True,
            forcerm=True,
            container_limits={"memory": memory, "memswap": memory},
            use_config_proxy=False,
            decode=True,
        )
        done = _follow(events, rebased, file, timeout_s, late)
        return done
    except APIError as error:
        raise TaskError(f"{file}: {printable(str(error.explanation), most=300)}") from error
    except (DockerException, OSError) as error:
        raise SandboxLost(f"{file}: the engine stopped building: {error}") from error
    finally:
        ended.set()
        _sweep(client, key, keep=done)


_DOCKERFILE = ".parl.Dockerfile"


def _follow(
    events: Iterator[Any], rebased: Rebased, file: Path, timeout_s: float, late: threading.Event
) -> str:
    """The image's id out of the build's events."""
    step, output, image = 0, "", ""
    for event in events:
        if text := event.get("stream"):
            if found := _STEP.match(text):
                step, output = int(found[1]), ""
            elif not text.startswith((" ---> ", "Removing intermediate container")):
                output = (output + text)[-4000:]
        elif "aux" in event and "ID" in event["aux"]:
            image = event["aux"]["ID"]
        elif "error" in event:
            raise TaskError(_failure(event["error"], step, output, rebased, file, timeout_s, late))
    if not image:
        raise SandboxLost(f"{file}: the engine built nothing")
    return image


def _failure(
    error: str,
    step: int,
    output: str,
    rebased: Rebased,
    file: Path,
    timeout_s: float,
    late: threading.Event,
) -> str:
    line = rebased.lines[step - 1] if 0 < step <= len(rebased.lines) else None
    where = f"{file}:{line.number}: {shown(line)}" if line is not None else str(file)
    if late.is_set():
        return f"{where}: not built within environment.build_timeout_sec = {timeout_s:g} s"
    code = _CODE.search(error)
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    if code is None:
        return printable(f"{where}: {error.strip().splitlines()[-1]}", most=400)
    last = printable(lines[-1] if lines else "no output", most=160)
    said = f"{where} failed with exit status {code[1]} ({last})"
    if _NO_NETWORK.search(output) or re.search(r"\b(curl|wget|git clone)\b", shown_rest(line)):
        said += (
            "; a build has no network: install it in the base image and name that in "
            "docker.base_images"
        )
    return said


def shown_rest(line: Any) -> str:
    """The whole text of an instruction, or nothing."""
    return "" if line is None else line.rest


def _tar(context: Context, dockerfile: str) -> io.BytesIO:
    """Fixed times and owners: equal content gives equal layers."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, path in context.entries():
            header = tar.gettarinfo(str(path), arcname=name)
            header.mtime = header.uid = header.gid = 0
            header.uname = header.gname = ""
            if header.isreg():
                with path.open("rb") as file:
                    tar.addfile(header, file)
            else:
                tar.addfile(header)
        content = dockerfile.encode()
        header = tarfile.TarInfo(_DOCKERFILE)
        header.size = len(content)
        tar.addfile(header, io.BytesIO(content))
        ignore = tarfile.TarInfo(".dockerignore")  # applied already; ours must not copy itself
        content = f"{_DOCKERFILE}\n.dockerignore\n".encode()
        ignore.size = len(content)
        tar.addfile(ignore, io.BytesIO(content))
    output.seek(0)
    return output


def _end_build(client: DockerClient, key: str) -> None:
    """Kill the step that runs: the builder's containers carry the label of the layer below."""
    for container in _builders(client, f"{LABEL}={key}"):
        engine.remove_container(client, container["Id"])


def _builders(client: DockerClient, label: str) -> list[dict[str, Any]]:
    """Containers of builds, not boxes that run such an image."""
    listed = client.api.containers(all=True, filters={"label": label})
    return [one for one in listed if engine.LABEL_BOX not in one["Labels"]]


def _sweep(client: DockerClient, key: str, keep: str) -> None:
    """Containers and untagged layers of this build that ``keep`` is not made of."""
    _end_build(client, key)
    filters = {"label": f"{LABEL}={key}", "dangling": True}
    while left := [one for one in client.api.images(filters=filters) if one["Id"] != keep]:
        if not sum(engine.remove_image(client, one["Id"]) for one in left):
            return


def reap_builds(client: DockerClient) -> int:
    """Remove containers and untagged layers of builds that ended without their owner; how many.
    Call with the build lock held: then no build of this user runs, and one of another user's is
    only taken for dead after an hour."""
    removed = 0
    before = time.time() - _HOUR_S
    for container in _builders(client, LABEL):
        if _is_ours(container["Labels"]) or container["Created"] < before:
            engine.remove_container(client, container["Id"])
            removed += 1
    filters = {"label": LABEL, "dangling": True}
    for image in client.api.images(filters=filters):
        if _is_ours(image["Labels"]) or image["Created"] < before:
            removed += engine.remove_image(client, image["Id"])
    return removed


def _is_ours(labels: dict[str, str]) -> bool:
    return labels.get(LABEL_USER) == str(os.getuid())


def reap_unused(client: DockerClient, repository: str, keep_days: float) -> int:
    """Remove tagged images of ``repository`` that were not used for so long; how many."""
    unused = time.time() - keep_days * 86400
    return sum(
        engine.remove_image(client, tag)
        for image in client.api.images(name=repository, filters={"label": LABEL})
        for tag in image["RepoTags"] or []
        if _last_used(client, tag) < unused
    )


def _last_used(client: DockerClient, tag: str) -> float:
    """Epoch seconds of the last time the tag was set, which every use does again."""
    from datetime import datetime

    text = client.api.inspect_image(tag).get("Metadata", {}).get("LastTagTime", "")
    found = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text or "")
    if found is None or found[1].startswith("0001"):
        return time.time()
    return datetime.fromisoformat(f"{found[1]}+00:00").timestamp() - (_offset(text))


def _offset(text: str) -> float:
    """Seconds east of Greenwich of an engine's time."""
    found = re.search(r"([+-])(\d\d):(\d\d)$", text)
    if found is None:
        return 0.0
    return (1 if found[1] == "+" else -1) * (int(found[2]) * 3600 + int(found[3]) * 60)


@contextmanager
def build_lock(wait: bool = True) -> Iterator[bool]:
    """One build at a time of one user: two of one key would remove each other's layers. Without
    ``wait`` False where somebody builds. BackendUnavailable where the lock cannot be kept."""
    # not the temporary folder: it differs between processes, and everybody writes there
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = caches / "parl" / "docker-build.lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise BackendUnavailable(
            f"docker builds: {path} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder you may write"
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def labels_of(key: str) -> str:
    """Arguments of the LABEL line that every stage starts with."""
    return f"{LABEL}={key} {LABEL_USER}={os.getuid()}"
