"""PARL's Python for images of tasks: one read-only volume a machine, mounted at /.parl.

An image may hold any Python or none. The interpreter of the base image and the libraries it needs
are copied into a volume; its loader's name is rewritten to the copy, so nothing of the image is
used to start it.
"""

from __future__ import annotations

import io
import secrets
import tarfile
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from infra.owners import process_owner
from sandbox.backends import docker_engine as engine
from sandbox.backends.docker_image import COMMANDS, header_of, image_files, listing
from sandbox.backends.interpreter import find_interpreter
from sandbox.box_image import RUNTIME
from sandbox.errors import BackendUnavailable

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "parl-sandbox-runtime"
LABEL = "parl.runtime"
_PATH = "parl.runtime.path"
_LOADER = f"{RUNTIME}/ld.so"


@dataclass(frozen=True, slots=True)
class Runtime:
    """``python`` and ``library_path`` are paths in a container that mounts ``volume`` at /.parl."""

    volume: str
    python: str
    library_path: str


def ensure_runtime(client: DockerClient) -> Runtime:
    """The volume of this machine's interpreter, filled when it is not there (two seconds).

    BackendUnavailable when the engine refuses it.
    """
    from docker.errors import APIError, NotFound

    digest = listing()[:16]
    marker = f"{REPOSITORY}-{digest}"
    try:
        labels = client.api.inspect_volume(marker)["Labels"]
        client.api.inspect_volume(labels[LABEL])
    except NotFound:
        try:
            volume = _fill(client, digest)
            # the marker names a volume only once it is whole: whoever dies before leaves none
            client.api.create_volume(marker, labels={LABEL: volume, _PATH: _library_path()})
            labels = client.api.inspect_volume(marker)["Labels"]
        except APIError as error:
            raise BackendUnavailable(f"docker: no volume for PARL's Python: {error}") from error
    return Runtime(labels[LABEL], f"{RUNTIME}{find_interpreter().path}", labels[_PATH])


def mount(runtime: Runtime) -> Any:
    """The volume in a container."""
    from docker.types import Mount

    return Mount(target=RUNTIME, source=runtime.volume, type="volume", read_only=True, no_copy=True)


def _fill(client: DockerClient, digest: str) -> str:
    """A volume of its own name with the files; what an earlier attempt left is removed."""
    for old in client.api.volumes(filters={"label": f"{LABEL}.of={digest}"})["Volumes"] or []:
        engine.remove_volume(client, old["Name"])
    image = f"{REPOSITORY}:{digest}"
    client.api.import_image_from_data(_content(), repository=REPOSITORY, tag=digest)
    volume = f"{REPOSITORY}-{digest}-{secrets.token_hex(4)}"
    client.api.create_volume(volume, labels={f"{LABEL}.of": digest})
    from docker.types import Mount

    host = client.api.create_host_config(
        network_mode="none", mounts=[Mount(target=RUNTIME, source=volume, type="volume")]
    )
    box_id = f"runtime-{secrets.token_hex(6)}"
    labels = {
        engine.LABEL_BOX: box_id,
        engine.LABEL_OWNER: process_owner(),
        engine.LABEL_EXPIRES: f"{time.time() + 600:.0f}",
    }
    # an empty volume is filled from the image when a container is created with it; none is started
    made = client.api.create_container(
        image, ["none"], name=engine.container_name(box_id), labels=labels, host_config=host
    )
    engine.remove_container(client, made["Id"])
    client.api.remove_image(image, force=True)
    return volume


def _library_path() -> str:
    """Where the interpreter's shared libraries are, as the loader's variable has it."""
    places = {
        str(PurePosixPath(name).parent)
        for name in image_files()
        if not name.startswith("usr/bin/") and "/python3" not in name and ".so" in name
    }
    return ":".join(f"{RUNTIME}/{place}" for place in sorted(places))


def _content() -> bytes:
    """A tar of the interpreter, its library, shared libraries and loader, below /.parl."""
    commands = {f"usr/bin/{command}" for command in COMMANDS}
    python = str(find_interpreter().path).lstrip("/")
    root = RUNTIME.lstrip("/")
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, path in sorted(image_files().items()):
            if name in commands:
                continue
            content = path.read_bytes()
            if PurePosixPath(name).name.startswith(("ld-linux", "ld64")):
                _add(tar, f"{root}/ld.so", content, 0o755, 0)
            if name == python:
                content = _reloaded(content)
            state = path.stat()
            mode = 0o755 if state.st_mode & 0o111 else 0o644
            # a compiled module is valid for the time of its source
            _add(tar, f"{root}/{name}", content, mode, int(state.st_mtime))
    return output.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int, mtime: int) -> None:
    header = header_of(name, len(content), mode)
    header.mtime = mtime
    tar.addfile(header, io.BytesIO(content))


def _reloaded(binary: bytes) -> bytes:
    """The interpreter with our loader's path in place of the system's, which is longer."""
    start = binary.find(b"/lib", 0, 4096)
    end = binary.find(b"\0", start)
    old = binary[start:end]
    if start < 0 or b"ld" not in old or len(old) < len(_LOADER):
        raise BackendUnavailable("docker: the loader of this machine's Python cannot be replaced")
    return binary[:start] + _LOADER.encode().ljust(len(old), b"\0") + binary[end:]
