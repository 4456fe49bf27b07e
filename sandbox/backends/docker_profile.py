"""Everything a box's container is created with: the hardened profile of facts/sandboxes.md 5.2.

A container of a task's own image has the same profile. What differs: PARL's Python comes in a
read-only volume, the task's folders are memory file systems of a size each, and the user is the
image's, unless that is root.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from infra.owners import process_owner
from sandbox.backends import docker_engine as engine
from sandbox.backends.docker_image import WORKDIR
from sandbox.backends.docker_runtime import Runtime, mount
from sandbox.backends.program import MIB
from sandbox.backends.wire import BOOTSTRAP
from sandbox.box_image import BoxImage
from sandbox.config import SandboxConfig

if TYPE_CHECKING:
    from docker import DockerClient

EXTRA_PROCESSES = 2
"""The agent and the worker count against the process limit."""
_MAX_INODES = 32768


def memory_bytes(config: SandboxConfig, image: BoxImage | None) -> int:
    """Limit of the whole box; the image's own files in memory come on top."""
    return (config.memory_mib + (image.seed_mib if image else 0)) * MIB


def disk_bytes(config: SandboxConfig, image: BoxImage | None) -> int:
    """Sizes of all file systems that may be written; memory limits them together."""
    folders = image.folders if image else ()
    return (config.disk_mib * (1 + len(folders)) + (image.seed_mib if image else 0)) * MIB


def network_mode(image: BoxImage | None) -> str:
    """The engine's word for it."""
    return "bridge" if image is not None and image.network else "none"


def profile(
    client: DockerClient,
    config: SandboxConfig,
    *,
    box_id: str,
    uid: int,
    owner: str,
    base: str,
    max_age_s: float,
    image: BoxImage | None,
    runtime: Runtime | None,
) -> dict[str, Any]:
    """Arguments of ``create_container``. ``base``: reference where no ``image`` is given;
    ``runtime`` is needed with one."""
    gid = uid if image is None or image.gid is None else image.gid
    python, library_path = [config.image_python], {}
    if image is not None:
        assert runtime is not None, "an image may hold no Python"
        python = [runtime.python]
        library_path = {"LD_LIBRARY_PATH": runtime.library_path, "LD_PRELOAD": ""}
    return {
        "image": base if image is None else image.reference,
        "name": engine.container_name(box_id),
        "hostname": "box",
        "user": f"{uid}:{gid}",
        "working_dir": WORKDIR,
        "entrypoint": [*python, "-I", "-S", "-B", "-c"],
        "command": [BOOTSTRAP, "0", "1"],
        "environment": {
            "PARL_BOX": box_id,
            "PATH": "/usr/bin:/bin",
            "HOME": WORKDIR,
            "TMPDIR": WORKDIR,
            "LANG": "C.UTF-8",
            **library_path,
        },
        "labels": {
            engine.LABEL_BOX: box_id,
            engine.LABEL_OWNER: process_owner(),
            engine.LABEL_RUN: config.run,
            engine.LABEL_EPISODE: owner,
            engine.LABEL_EXPIRES: f"{time.time() + max_age_s:.0f}",
        },
        "stdin_open": True,
        "tty": False,
        "healthcheck": {"test": ["NONE"]},
        "host_config": _host_config(client, config, image, runtime, uid, gid),
    }


def _host_config(
    client: DockerClient,
    config: SandboxConfig,
    image: BoxImage | None,
    runtime: Runtime | None,
    uid: int,
    gid: int,
) -> Any:
    from docker.types import LogConfig, Ulimit

    memory = memory_bytes(config, image)
    return client.api.create_host_config(
        network_mode=network_mode(image),
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=config.max_processes + EXTRA_PROCESSES,
        nano_cpus=int(config.cpus * 1e9),
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        read_only=True,
        tmpfs=_file_systems(config, image, uid, gid),
        mounts=None if runtime is None else [mount(runtime)],
        ipc_mode="none",  # no /dev/shm, no message queues
        ulimits=[
            Ulimit(name="core", soft=0, hard=0),
            Ulimit(name="nofile", soft=config.max_open_files, hard=config.max_open_files),
        ],
        log_config=LogConfig(type=LogConfig.types.NONE),
        auto_remove=True,
        privileged=False,
    )


def _file_systems(
    config: SandboxConfig, image: BoxImage | None, uid: int, gid: int
) -> dict[str, str]:
    """Path -> options. Programs may be run from them: tests run scripts that a task wrote."""

    def options(mode: int, seed_mib: int = 0, num_files: int = 0) -> str:
        size = (config.disk_mib + seed_mib) * MIB
        return (
            f"rw,exec,nosuid,nodev,mode={mode:04o},uid={uid},gid={gid},size={size},"
            f"nr_inodes={_MAX_INODES + num_files}"
        )

    found = {WORKDIR: options(0o700)}
    for folder in image.folders if image else ():
        found[folder.path] = options(folder.mode, folder.size_mib, folder.num_files)
    return found
