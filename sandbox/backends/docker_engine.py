"""The Docker engine: is it here, can it enforce what a box needs, and whose containers are left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infra.owners import is_dead
from sandbox.errors import BackendUnavailable

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LABEL_BOX = "parl.box"
LABEL_OWNER = "parl.owner"
"""``infra.leases.process_owner`` of the process that made the container."""
LABEL_EPISODE = "parl.episode"
LABEL_RUN = "parl.run"
LABEL_EXPIRES = "parl.expires"
"""Epoch seconds after which anybody may remove it."""
_NEEDED = {
    "MemoryLimit": "memory limit",
    "SwapLimit": "swap limit",
    "PidsLimit": "process limit",
    "CpuCfsQuota": "CPU quota",
}
_TIMEOUT_S = 60


def container_name(box_id: str) -> str:
    """Name of a box's container; known before it exists."""
    return f"parl-{box_id}"


def connect() -> DockerClient:
    """A client of the local engine. BackendUnavailable: no SDK, no engine, or a remote one."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise BackendUnavailable(
            f"docker: the SDK is not installed: pip install docker ({error})"
        ) from None
    host = os.environ.get("DOCKER_HOST") or "unix://"
    if not host.startswith("unix://"):
        raise BackendUnavailable(
            f"docker: DOCKER_HOST={host} is not a local socket; the limits of a remote engine "
            "cannot be read back: run the worker on that machine"
        )
    try:
        client = docker.from_env(timeout=_TIMEOUT_S)
    except DockerException as error:
        denied = "PermissionError" in str(error)
        remedy = (
            "this user may not use its socket: join the group that owns it (usually docker)"
            if denied
            else "install docker.io and start dockerd"
        )
        raise BackendUnavailable(
            f"docker: no engine answers ({_first_line(error)}); {remedy}"
        ) from error
    try:
        client.ping()
    except (DockerException, OSError) as error:
        client.close()
        raise BackendUnavailable(f"docker: no engine answers ({_first_line(error)})") from error
    return client


@contextmanager
def connected() -> Iterator[DockerClient]:
    """``connect`` for a block."""
    client = connect()
    try:
        yield client
    finally:
        client.close()


def check(client: DockerClient) -> str:
    """What the engine enforces, in one line; BackendUnavailable names what it cannot."""
    info: dict[str, Any] = client.info()
    missing = [words for key, words in _NEEDED.items() if not info.get(key, False)]
    if not any("seccomp" in option for option in info.get("SecurityOptions") or []):
        missing.append("seccomp")
    if any("name=rootless" in option for option in info.get("SecurityOptions") or []) and (
        info.get("CgroupDriver") == "none"
    ):
        missing.append("cgroups (rootless engine without delegation)")
    if missing:
        raise BackendUnavailable(
            f"docker {info.get('ServerVersion')}: the engine cannot enforce: {', '.join(missing)}"
        )
    return (
        f"engine {info['ServerVersion']}, cgroup v{info.get('CgroupVersion', '1')}, "
        f"{info['Driver']}, {info.get('DefaultRuntime')}"
    )


def remove_container(client: DockerClient, name: str) -> None:
    """Kill and remove; nothing to do when it is gone. Waits until the engine has let go of it."""
    from docker.errors import APIError, NotFound

    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            client.api.remove_container(name, force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            # 409: a removal (auto-remove after the end of the stream) is already under way
            if error.status_code != 409 or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def remove_volume(client: DockerClient, name: str) -> None:
    """Remove it; one that is gone or in use stays as it is."""
    from docker.errors import APIError

    try:
        client.api.remove_volume(name)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def remove_image(client: DockerClient, name: str) -> bool:
    """Remove an image and its untagged parents; False where something still uses it."""
    from docker.errors import APIError

    try:
        client.api.remove_image(name)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise
        return error.status_code == 404
    return True


def left_containers(client: DockerClient, now: float | None = None) -> list[Container]:
    """Containers of boxes whose owner process is dead or whose time has passed."""
    at = time.time() if now is None else now
    found = []
    for container in client.containers.list(
        all=True, ignore_removed=True, filters={"label": LABEL_BOX}
    ):
        labels = container.labels
        if is_dead(labels.get(LABEL_OWNER, "")) or float(labels.get(LABEL_EXPIRES, 0)) < at:
            found.append(container)
    return found


def reap_containers(client: DockerClient, now: float | None = None) -> int:
    """Remove them; returns how many."""
    left = left_containers(client, now)
    for container in left:
        assert container.id is not None, "the engine lists containers by id"
        remove_container(client, container.id)
    return len(left)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
