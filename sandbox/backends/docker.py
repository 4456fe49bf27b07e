"""Hardened containers over the Docker SDK: the agent is init, spoken to over one attached stream.

Always on: no network, memory = swap limit, process and CPU limits, no capabilities, no new
privileges, the engine's default seccomp profile with ours on top, read-only root, one size-capped
tmpfs, a uid of its own, no log driver, no core files (facts/sandboxes.md 5.2). The agent itself is
PID 1, an init that reaps: docker-init in front of it would be a process of the same uid whose
standard streams, the host's connection, any tool could open.

The container ends when its stream does (a killed owner closes it) and the engine then removes it;
what an engine crash leaves is found by its labels.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.backends import cgroup, enforced
from sandbox.backends import docker_engine as engine
from sandbox.backends.base import Level
from sandbox.backends.docker_build import build_lock, reap_builds
from sandbox.backends.docker_image import WORKDIR, ensure_image
from sandbox.backends.docker_profile import (
    EXTRA_PROCESSES,
    disk_bytes,
    memory_bytes,
    network_mode,
    profile,
)
from sandbox.backends.docker_runtime import Runtime, ensure_runtime
from sandbox.backends.framed_box import FramedBox
from sandbox.backends.printable import printable
from sandbox.backends.program import MIB, BoxProgram
from sandbox.backends.wire import SocketChannel
from sandbox.box_image import BoxImage
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxLost

if TYPE_CHECKING:
    from docker import DockerClient

NUM_SLOTS = 60000
_RETIRE_BEFORE_S = 3600.0
_STDERR = 2
_MAX_WORDS = 4096


class AttachChannel(SocketChannel):
    """An attached stream: what we write is raw, what comes back is in the engine's records (stream
    number, three zero bytes, length big-endian, payload)."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._left = 0
        self._stream = 0
        self.words = bytearray()
        """Start of what the container wrote to standard error."""

    async def _some(self, most: int) -> bytes:
        while True:
            if self._left == 0:
                header = b""
                while len(header) < 8:
                    header += await super()._some(8 - len(header))
                self._stream = header[0]
                self._left = int.from_bytes(header[4:], "big")
                continue
            chunk = await super()._some(min(most, self._left))
            self._left -= len(chunk)
            if self._stream != _STDERR:
                return chunk
            self.words += chunk[: _MAX_WORDS - len(self.words)]


class DockerBox(FramedBox):
    """Implements ``sandbox.backends.base.PooledBox``."""

    def __init__(
        self, box_id: str, container_id: str, channel: AttachChannel, backend: DockerBackend
    ) -> None:
        super().__init__(box_id, Level.DOCKER, channel)
        self.container_id = container_id
        self.host_pid = 0
        """Of the agent, on the host; 0 until it runs."""
        self._words = channel
        self._backend = backend
        self._groups: tuple[Path, ...] = ()
        self._born = time.time()

    @property
    def pid(self) -> None:
        """The engine's, not ours: a lease names the container instead."""
        return None

    @property
    def alive(self) -> bool:
        """Not killed by us and its first process runs."""
        return self._killing is None and Path(f"/proc/{self.host_pid}").exists()

    @property
    def worn(self) -> bool:
        """Close to the expiry on its label."""
        return time.time() > self._born + self._backend.max_age_s - _RETIRE_BEFORE_S

    @property
    def oom_kills(self) -> int:
        """Processes of this box the kernel killed for memory (State.OOMKilled does not say)."""
        return cgroup.oom_kills(self._groups)

    def last_words(self) -> str:
        """What the engine says the container ended with."""
        text = self._words.words.decode("utf-8", "replace").strip()
        lines = text.splitlines()
        if lines:
            return printable(lines[-1], most=300)
        return self._backend.cause(self.container_id, self._born)

    def started(self, host_pid: int, groups: tuple[Path, ...], record: dict[str, Any]) -> None:
        """The container runs and its limits were read back."""
        self.host_pid, self._groups, self.enforced = host_pid, groups, record

    async def _end(self) -> None:
        """See ``FramedBox``: the whole container, not the client that waits for it."""
        await asyncio.to_thread(self._backend.end, self.container_id)


class DockerBackend:
    """Opens hardened containers. Construction checks the engine, makes the image if needed, and
    removes what dead owners left."""

    level = Level.DOCKER

    def __init__(self, config: SandboxConfig) -> None:
        """BackendUnavailable in one line: what is missing and what to install or change."""
        self.max_age_s = config.max_age_s
        self._config = config
        self._client: DockerClient = engine.connect()
        self.words = engine.check(self._client)
        engine.reap_containers(self._client)
        with build_lock(wait=False) as alone:
            if alone:
                reap_builds(self._client)
        self.image = self._image()
        self._found_runtime: Runtime | None = None
        self._runtime_lock = threading.Lock()

    def footprint(self, box_id: str) -> dict[str, list[str]]:
        """The container's name, known before it exists."""
        return {"cgroups": [], "directories": [], "containers": [engine.container_name(box_id)]}

    async def open(self, box_id: str, program: BoxProgram, owner: str = "") -> DockerBox:
        """Create, attach, start, read the limits back, load the program. SandboxLost when it does
        not come up; BackendUnavailable when a limit did not take."""
        # not cancelled half-way: a container that is being created must be known to be removed
        making = asyncio.ensure_future(asyncio.to_thread(self._make, box_id, owner, program.image))
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

    def end(self, container_id: str) -> None:
        """Kill and remove the container."""
        engine.remove_container(self._client, container_id)

    def cause(self, container_id: str, born: float) -> str:
        """Why a container ended, from the engine's events: it is gone itself."""
        # seconds with a fraction, which the SDK's types do not name but the engine takes
        since: Any = f"{born:.6f}"
        until: Any = f"{time.time():.6f}"
        filters = {"container": container_id, "event": ["oom", "die"]}
        events: Any = self._client.api.events(since, until, filters=filters, decode=True)
        words = []
        for event in events:
            if event.get("Action") == "oom":
                words.append("out of memory")
            elif event.get("Action") == "die":
                words.append(f"exit status {event['Actor']['Attributes'].get('exitCode')}")
        return ", ".join(dict.fromkeys(words))

    def _image(self) -> str:
        """The configured image, pinned and local, else our base image."""
        from docker.errors import ImageNotFound

        asked = self._config.image
        if asked is None:
            return ensure_image(self._client)
        if "sha256:" not in asked:
            raise BackendUnavailable(
                f"docker: image {asked!r} is not pinned; name it as NAME@sha256:... or by its id"
            )
        try:
            image = self._client.images.get(asked)
        except ImageNotFound as error:
            raise BackendUnavailable(
                f"docker: image {asked!r} is not on this engine and is not pulled: docker load it"
            ) from error
        assert image.id is not None, "the engine knows images by id"
        return image.id

    def _runtime(self) -> Runtime:
        """Looked up once; the volume is in use from the first box on."""
        with self._runtime_lock:
            if self._found_runtime is None:
                self._found_runtime = ensure_runtime(self._client)
            return self._found_runtime

    def _make(self, box_id: str, owner: str, image: BoxImage | None) -> DockerBox:
        """Blocking part of ``open``; leaves nothing when it fails."""
        from docker.errors import APIError

        uid = self._config.uid_base + secrets.randbelow(NUM_SLOTS)
        if image is not None and image.uid is not None:
            uid = image.uid
        api = self._client.api
        try:
            made = api.create_container(**self._profile(box_id, uid, owner, image))
        except APIError as error:
            raise SandboxLost(f"box {box_id}: no container: {error.explanation}") from error
        container_id = made["Id"]
        try:
            if made.get("Warnings"):
                raise BackendUnavailable(f"docker: a limit was dropped: {made['Warnings'][0]}")
            box = DockerBox(box_id, container_id, self._attach(container_id), self)
            api.start(container_id)
            state = api.inspect_container(container_id)
            pid = state["State"]["Pid"]
            groups, version = _limits_of(pid, container_id)
            record = self._read_back(state, groups, version, uid, image)
            box.started(pid, groups, record)
        except APIError as error:
            engine.remove_container(self._client, container_id)
            raise SandboxLost(f"box {box_id} did not start: {error.explanation}") from error
        except BaseException:
            engine.remove_container(self._client, container_id)
            raise
        return box

    def _profile(
        self, box_id: str, uid: int, owner: str, image: BoxImage | None = None
    ) -> dict[str, Any]:
        """Everything the container is created with."""
        return profile(
            self._client,
            self._config,
            box_id=box_id,
            uid=uid,
            owner=owner,
            base=self.image,
            max_age_s=self.max_age_s,
            image=image,
            runtime=None if image is None else self._runtime(),
        )

    def _attach(self, container_id: str) -> AttachChannel:
        """Before the start, so that nothing is missed."""
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        attached: Any = self._client.api.attach_socket(container_id, params=streams)
        ours = socket.socket(fileno=os.dup(attached.fileno()))
        # the SDK's own descriptors would keep the stream, and with it the container, alive
        attached._response.close()
        attached.close()
        return AttachChannel(ours)

    def _read_back(
        self,
        state: dict[str, Any],
        groups: tuple[Path, ...],
        version: int,
        uid: int,
        image: BoxImage | None = None,
    ) -> dict[str, Any]:
        """The record of limits from the cgroup's own files; BackendUnavailable where one is not as
        asked."""
        config = self._config
        asked = cgroup.CgroupLimits(
            memory_bytes(config, image), config.max_processes + EXTRA_PROCESSES, config.cpus
        )
        found = cgroup.read_limits(groups, version)
        if found != asked:
            raise BackendUnavailable(f"docker: asked for {asked}, the cgroup has {found}")
        host = state["HostConfig"]
        network = network_mode(image)
        if host["Privileged"] or host["NetworkMode"] != network or not host["ReadonlyRootfs"]:
            raise BackendUnavailable("docker: the engine did not keep the hardened profile")
        return (
            enforced.process_limits(config, self.level, uid)
            | enforced.isolation(config, seccomp="engine default + deny-list", image=state["Image"])
            | enforced.group_limits(found.memory_bytes, found.cpus, version)
            | {
                "namespaces": ["pid", "net", "ipc", "uts", "mount"],
                "network": network,
                "disk_bytes": disk_bytes(config, image),
                "max_file_bytes": (config.disk_mib + (image.largest_mib if image else 0)) * MIB,
            }
        )


def _limits_of(pid: int, container_id: str) -> tuple[tuple[Path, ...], int]:
    """The container's cgroup directories as seen here, and their version."""
    try:
        groups, version = cgroup.directories_of(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SandboxLost(f"container {container_id[:12]} ended while it started") from error
    if not all(container_id in str(group) for group in groups):
        raise BackendUnavailable(
            "docker: the engine runs in another pid namespace, so its limits cannot be read back; "
            "run next to the engine"
        )
    return groups, version
