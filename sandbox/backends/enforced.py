"""The record of the limits a box really has (``Box.enforced``), one shape for every backend."""

from __future__ import annotations

from typing import Any

from sandbox.backends.base import Level
from sandbox.backends.program import MIB
from sandbox.config import SandboxConfig

KEYS = (
    "level", "memory_bytes", "memory_scope", "swap_bytes", "max_processes", "cpus", "disk_bytes",
    "max_file_bytes", "max_open_files", "cpu_s", "core_bytes", "network", "root_file_system",
    "capabilities", "no_new_privileges", "seccomp", "namespaces", "uid", "cgroup_version", "image",
)  # fmt: skip
"""None = not enforced at this level. ``memory_scope``: "box" or "process"."""

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "mount", "cgroup")


def process_limits(config: SandboxConfig, level: Level, uid: int | None) -> dict[str, Any]:
    """What every level has: the rlimits the agent sets before any code of the task runs, and the
    deadline of each call. Everything else is None until a backend fills it in."""
    return dict.fromkeys(KEYS) | {
        "level": level.value,
        "memory_bytes": config.memory_mib * MIB,
        "memory_scope": "process",
        "max_file_bytes": config.disk_mib * MIB,
        "max_open_files": config.max_open_files,
        "cpu_s": config.cpu_s,
        "core_bytes": 0,
        "uid": uid,
    }


def isolation(config: SandboxConfig, **more: Any) -> dict[str, Any]:
    """What levels A and B and a container add."""
    return {
        "max_processes": config.max_processes,
        "disk_bytes": config.disk_mib * MIB,
        "network": "none",
        "root_file_system": "read-only",
        "capabilities": "none",
        "no_new_privileges": True,
        "namespaces": list(NAMESPACES),
        **more,
    }


def group_limits(memory_bytes: int, cpus: float, version: int) -> dict[str, Any]:
    """What a cgroup adds, as read back from its files."""
    return {
        "memory_bytes": memory_bytes,
        "memory_scope": "box",
        "swap_bytes": 0,
        "cpus": cpus,
        "cgroup_version": version,
    }
