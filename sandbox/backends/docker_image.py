"""The base image of containers: Python and a small userland of this machine, no pull.

``rootfs()`` is a tar with fixed order, owners and modes, so that the same files give the same
bytes; their hash is the tag. ``ensure_image`` imports it once per engine.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from sandbox.backends.interpreter import find_interpreter
from sandbox.errors import BackendUnavailable

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "parl-sandbox-base"
WORKDIR = "/box"
_LABEL = "parl.files"
COMMANDS = (
    "sh", "bash", "awk", "base64", "basename", "cat", "chmod", "cmp", "cp", "cut", "date", "dd",
    "df", "diff", "dirname", "du", "echo", "env", "expr", "false", "find", "grep", "gzip", "head",
    "id", "kill", "ln", "ls", "md5sum", "mkdir", "mkfifo", "mktemp", "mv", "nproc", "od", "paste",
    "printf", "ps", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq", "setsid",
    "sha256sum", "sleep", "sort", "split", "stat", "tac", "tail", "tar", "tee", "test", "timeout",
    "touch", "tr", "true", "truncate", "uname", "uniq", "unlink", "wc", "which", "xargs",
)  # fmt: skip
"""Copied where this machine has them; ``sh`` and Python are required."""
_LAYOUT = (
    "import json,sysconfig as s;print(json.dumps([s.get_path('stdlib'),s.get_path('platstdlib')]))"
)
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter"})
_DIRECTORIES = ("box", "dev", "etc", "proc", "sys", "usr", "usr/bin")
_PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/box:/bin/sh\n"


def ensure_image(client: DockerClient) -> str:
    """Reference of the base image on this engine, made when it is not there; a second.

    BackendUnavailable when the engine refuses it or this machine has no complete Python.
    """
    from docker.errors import APIError, ImageNotFound

    label = f"{_LABEL}={listing()}"
    # reading every file again at every start would cost a second; sizes and times tell as much
    for image in client.images.list(name=REPOSITORY, filters={"label": label}):
        if image.tags:
            return image.tags[0]
    reference = base_reference()
    repository, _, tag = reference.partition(":")
    try:
        answer = client.api.import_image_from_data(
            rootfs(), repository=repository, tag=tag, changes=[f"LABEL {label}"]
        )
        client.images.get(reference)
    except (APIError, ImageNotFound) as error:
        raise BackendUnavailable(
            f"docker: importing the base image {reference} failed: {error}"
        ) from error
    assert "error" not in json.loads(answer.strip().splitlines()[-1]), answer
    return reference


def listing() -> str:
    """Hash of what the image would be made of: names, sizes and times. The shared libraries stand
    behind the loader's cache, which every change of one rewrites."""
    lines = [json.dumps([_PASSWD.decode(), sorted(_links().items())])]
    named = [*sorted(_programs().items()), *sorted(_library().items())]
    cache = Path("/etc/ld.so.cache")
    for name, path in [*named, (cache.name, cache)] if cache.exists() else named:
        state = path.stat()
        lines.append(json.dumps([name, str(path), state.st_size, state.st_mtime_ns]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@functools.cache
def base_reference(own_tmp: bool = False) -> str:
    """Name of the base image of this machine: the hash of its content is the tag."""
    return f"{REPOSITORY}:{hashlib.sha256(rootfs(own_tmp)).hexdigest()[:16]}"


def rootfs(own_tmp: bool = False) -> bytes:
    """The tar of the base image (about 60 MiB). ``own_tmp``: /tmp is a folder, else it is a link to
    the one writable directory of a container."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted({*_DIRECTORIES, *_parents(image_files())}):
            tar.addfile(_header(name, tarfile.DIRTYPE, 0o755))
        for name, target in sorted(_links().items()):
            if name == "tmp" and own_tmp:
                tar.addfile(_header(name, tarfile.DIRTYPE, 0o1777))
                continue
            tar.addfile(_link(name, target))
        tar.addfile(header_of("etc/passwd", len(_PASSWD)), io.BytesIO(_PASSWD))
        for name, path in sorted(image_files().items()):
            state = path.stat()
            header = header_of(name, state.st_size, 0o755 if state.st_mode & 0o111 else 0o644)
            # a compiled module is valid for the time of its source
            header.mtime = int(state.st_mtime)
            with path.open("rb") as file:
                tar.addfile(header, file)
    return output.getvalue()


def _header(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.mtime = kind, mode, 0
    return header


def header_of(name: str, size: int, mode: int = 0o644) -> tarfile.TarInfo:
    header = _header(name, tarfile.REGTYPE, mode)
    header.size = size
    return header


def _link(name: str, target: str) -> tarfile.TarInfo:
    header = _header(name, tarfile.SYMTYPE, 0o777)
    header.linkname = target
    return header


def _links() -> dict[str, str]:
    """Merged /usr, and /tmp in the one writable directory."""
    links = {"tmp": WORKDIR.lstrip("/"), "bin": "usr/bin"}
    links |= {name: f"usr/{name}" for name in ("lib", "lib64") if (Path("/") / name).is_symlink()}
    interpreter = find_interpreter().path
    if interpreter != Path("/usr/bin/python3"):
        links["usr/bin/python3"] = str(interpreter)
    return links


def _parents(files: dict[str, Path]) -> Iterator[str]:
    for name in files:
        yield from (str(parent) for parent in PurePosixPath(name).parents if parent.name)


@functools.cache
def image_files() -> dict[str, Path]:
    """Name in the image -> file of this machine; links are resolved."""
    files = _programs() | _library()
    binaries = [*_programs().values(), *(f for f in _library().values() if f.suffix == ".so")]
    for name, path in _shared_libraries(binaries).items():
        files.setdefault(name, path)
    return files


def _programs() -> dict[str, Path]:
    """The commands and Python itself."""
    found: dict[str, Path] = {}
    for command in COMMANDS:
        path = shutil.which(command, path="/usr/bin:/bin")
        if path is not None:
            found[f"usr/bin/{command}"] = Path(path).resolve()
    if "usr/bin/sh" not in found:
        raise BackendUnavailable("docker: this machine has no sh to build the base image from")
    python = find_interpreter().path
    found[str(python).lstrip("/")] = python.resolve()
    return found


@functools.cache
def _library() -> dict[str, Path]:
    """Python's standard library, without tests and installed packages."""
    run = [str(find_interpreter().path), "-I", "-S", "-c", _LAYOUT]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=20)
    found: dict[str, Path] = {}
    for root in {Path(folder) for folder in json.loads(done.stdout)}:
        for path in root.rglob("*"):
            inner = path.relative_to(root)
            if path.is_file() and not _SKIPPED & set(inner.parts) and path.suffix != ".a":
                found[str(path).lstrip("/")] = path
    return found


def _shared_libraries(binaries: list[Path]) -> dict[str, Path]:
    """What the loader would map for them, under the name it looks for."""
    command = ["ldd", *map(str, binaries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found: dict[str, Path] = {}
    for line in done.stdout.splitlines():
        words = line.split()
        target = words[2] if "=>" in words and len(words) > 2 else words[0] if words else ""
        if line.startswith("\t") and target.startswith("/"):
            path = Path(target)
            # /lib is a link to usr/lib: a tar member below a link would be refused or lost
            name = path.parent.resolve() / path.name
            found[str(name).lstrip("/")] = path.resolve()
    return found
