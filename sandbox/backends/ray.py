"""gVisor sandboxes of ``ray.experimental.sandbox`` (Ray >= 2.58, alpha), where runsc is installed.

Ray makes the sandbox: image, network none, read-only root, no capabilities; only its tmpfs at /tmp
is writable. The agent then runs through one long ``runsc exec``, because Ray's own ``exec`` starts
a process per call, reads its whole output into memory, and on a timeout leaves the command running
(facts/sandboxes.md 5.1). Ray tolerates a cgroup it may not write, so nothing here counts on one:
the record names limits per process only.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sandbox.backends import docker_image, enforced
from sandbox.backends.base import Level
from sandbox.backends.framed_box import FramedBox
from sandbox.backends.printable import printable
from sandbox.backends.program import MIB, BoxProgram
from sandbox.backends.wire import BOOTSTRAP, SocketChannel
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxError, SandboxLost

WORKDIR = "/tmp"
_UID = 65534
_BUNDLES = Path("/tmp/ray/sandbox")
_RUNSC_ROOT = "/tmp/runsc"
"""Both are Ray's (ray.experimental.sandbox.backend.gvisor)."""
_EROFS_SINCE = 20240101
"""Ray mounts images as EROFS inside gVisor; runsc of distributions from before does not know it."""


def find_runsc() -> str:
    """Version of runsc. BackendUnavailable: it, mkfs.erofs or Ray is missing or too old."""
    path = shutil.which("runsc")
    if path is None:
        raise BackendUnavailable("ray: runsc (gVisor) is not installed on this node")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = (done.stdout.splitlines() or ["unknown"])[0].removeprefix("runsc version ")
    date = re.search(r"20\d{6}", version)
    if date is None or int(date.group()) < _EROFS_SINCE:
        raise BackendUnavailable(
            f"ray: runsc {version} is too old; Ray needs one from 2024 or later"
        )
    try:
        from ray.experimental.sandbox._internal.image_utils import require_mkfs_erofs
        from ray.experimental.sandbox.exceptions import SandboxError as RaySandboxError
    except ImportError as error:
        raise BackendUnavailable(
            f"ray: no ray.experimental.sandbox ({error}): Ray >= 2.58"
        ) from error
    try:
        require_mkfs_erofs()
    except RaySandboxError as error:
        raise BackendUnavailable(f"ray: {printable(str(error), most=200)}") from error
    return f"runsc {version}"


class RayBox(FramedBox):
    """Implements ``sandbox.backends.base.PooledBox`` over one ``runsc exec``."""

    def __init__(
        self, box_id: str, process: subprocess.Popen[bytes], sock: socket.socket, end: Any
    ) -> None:
        """``end`` deletes the sandbox; it may block."""
        super().__init__(box_id, Level.GVISOR, SocketChannel(sock))
        self._process = process
        self._delete = end

    @property
    def pid(self) -> int:
        """The exec client on the host."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Not killed by us and the exec has not ended."""
        return self._killing is None and self._process.poll() is None

    def last_words(self) -> str:
        """The exec's exit status."""
        return f"exit status {self._process.poll()}"

    async def _end(self) -> None:
        """See ``FramedBox``: the sandbox first, the client that waits for it second."""
        await asyncio.to_thread(self._delete)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


class RayBackend:
    """Opens sandboxes through Ray's node-local runtime; no cluster is needed."""

    level = Level.GVISOR

    def __init__(self, config: SandboxConfig) -> None:
        """BackendUnavailable with the reason; makes and deletes one sandbox to be sure."""
        self.words = find_runsc()
        from ray.experimental.sandbox import SandboxRuntime

        self._config = config
        self._runtime = SandboxRuntime()
        self._image = str(_image())
        self._try_out()

    def footprint(self, box_id: str) -> dict[str, list[str]]:
        """Ray names its sandbox itself; it is found by the marker in its bundle."""
        return {"cgroups": [], "directories": [], "gvisor": [box_id]}

    async def open(self, box_id: str, program: BoxProgram, owner: str = "") -> RayBox:
        """Start a sandbox and load the program; SandboxLost if it does not come up in time."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, box_id))
        try:
            box = await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait({making})
            if making.exception() is None:
                await making.result().kill()
            raise
        hello = program.hello(self._config, self.level, WORKDIR)
        await box.greet(hello, self._config.start_timeout_s)
        return box

    def _create(self, box_id: str) -> str:
        from ray.experimental.sandbox.exceptions import SandboxError as RaySandboxError

        try:
            return self._runtime.create(
                image=self._image,
                cpu=self._config.cpus,
                memory=self._config.memory_mib * MIB,
                env={"PARL_BOX": box_id, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                ttl_seconds=int(self._config.max_age_s),
                timeout_seconds=self._config.start_timeout_s,
                rootless=os.geteuid() != 0,
                network="none",
                capabilities=[],
                readonly=True,
            )
        except RaySandboxError as error:
            raise SandboxLost(f"box {box_id}: {printable(str(error), most=300)}") from error

    def _make(self, box_id: str) -> RayBox:
        """Blocking part of ``open``; leaves nothing when it fails."""
        instance = self._create(box_id)
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                self._command(instance),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={"PARL_BOX": box_id, "PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._runtime.delete(instance)
            raise
        finally:
            theirs.close()
        box = RayBox(box_id, process, ours, lambda: self._runtime.delete(instance))
        box.enforced = (
            enforced.process_limits(self._config, self.level, _UID)
            | enforced.isolation(self._config, seccomp="gVisor", image=Path(self._image).stem)
            | {"disk_bytes": None, "max_processes": None}
        )
        return box

    def _command(self, instance: str) -> list[str]:
        """``runsc exec`` with the flags Ray made the sandbox with."""
        found = self._runtime.backend._sandbox_metadata[instance]["config"]
        runsc = self._runtime.backend._runsc_base_args(found)
        python = ["/usr/bin/python3", "-I", "-S", "-B", "-c", BOOTSTRAP, "0", "1"]
        return [*runsc, "exec", "-cwd", WORKDIR, "-user", f"{_UID}:{_UID}", instance, *python]

    def _try_out(self) -> None:
        box_id = f"probe-{secrets.token_hex(8)}"
        try:
            self._runtime.delete(self._create(box_id))
        except SandboxLost as error:
            raise BackendUnavailable(f"ray: an empty sandbox does not start: {error}") from error


def reap_sandbox(box_id: str, bundles: Path = _BUNDLES) -> None:
    """Delete the sandbox of a dead owner: the one whose bundle names the box. Ray keeps no record
    outside the process that made it."""
    for bundle in bundles.glob("ray-sandbox-*"):
        config = bundle / "config.json"
        if not config.exists() or f"PARL_BOX={box_id}" not in config.read_text():
            continue
        command = ["runsc", "--root", _RUNSC_ROOT, "delete", "-force", bundle.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0 and "does not exist" not in done.stderr:
            raise SandboxError(f"box {box_id}: {printable(done.stderr.strip(), most=300)}")
        shutil.rmtree(bundle, ignore_errors=True)


def _image() -> Path:
    """The base image as a tar, written once per content and user."""
    name = docker_image.base_reference(own_tmp=True).replace(":", "-")
    path = Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}.tar"
    if not path.exists():
        part = path.with_suffix(f".{secrets.token_hex(4)}")
        part.write_bytes(docker_image.rootfs(own_tmp=True))
        part.rename(path)
    return path
