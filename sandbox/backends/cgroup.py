"""cgroup limits of one box, versions 1 and 2, by plain files.

A box's cgroups lie below this process's own (v1) or below the nearest ancestor that hands the
memory and pids controllers to its children (v2), so limits that already hold for us still hold.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import BackendUnavailable

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_V2_NEEDED = frozenset({"memory", "pids"})


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    memory_bytes: int
    max_processes: int
    cpus: float


@dataclass(frozen=True, slots=True)
class CgroupParents:
    """Where boxes' cgroups go: one directory per controller (v1) or a single one (v2)."""

    version: int
    directories: tuple[Path, ...]

    def of(self, box_id: str) -> tuple[Path, ...]:
        """The directories a box will own; known before they exist, for its lease."""
        return tuple(parent / f"parl-{box_id}" for parent in self.directories)


def find_parents(proc: Path = Path("/proc/self")) -> CgroupParents:
    """BackendUnavailable, with the reason, when limits cannot be set here."""
    mounts = _mounts((proc / "mountinfo").read_text())
    own = dict(_own_paths((proc / "cgroup").read_text()))
    if all(controller in mounts for controller in CONTROLLERS):
        directories = []
        for controller in CONTROLLERS:
            point, root = mounts[controller]
            directory = point / os.path.relpath(own.get(controller, "/"), root)
            if not os.access(directory, os.W_OK):
                raise BackendUnavailable(f"cgroup v1 directory {directory} is not writable")
            directories.append(directory)
        return CgroupParents(1, tuple(dict.fromkeys(directories)))
    if "" not in mounts:
        raise BackendUnavailable("no cgroup file system with memory and pids is mounted")
    point, root = mounts[""]
    directory = point / os.path.relpath(own.get("", "/"), root)
    return CgroupParents(2, (_v2_parent(directory, point),))


def _v2_parent(directory: Path, top: Path) -> Path:
    """Nearest writable ancestor whose children get the controllers; it is asked to give them."""
    reason = "no ancestor is writable (run in a scope with Delegate=yes)"
    for candidate in (directory, *directory.parents):
        if not candidate.is_relative_to(top):
            break
        if not os.access(candidate / "cgroup.procs", os.W_OK) or not os.access(candidate, os.W_OK):
            break
        given = set((candidate / "cgroup.subtree_control").read_text().split())
        if given >= _V2_NEEDED:
            return candidate
        offered = set((candidate / "cgroup.controllers").read_text().split())
        wanted = [name for name in CONTROLLERS if name in offered]
        if not set(wanted) >= _V2_NEEDED:
            reason = f"{candidate} is not given the memory and pids controllers"
            continue
        try:
            text = " ".join(f"+{name}" for name in wanted)
            (candidate / "cgroup.subtree_control").write_text(text)
        except OSError as error:  # a cgroup with processes of its own cannot delegate
            reason = f"{candidate}: {error.strerror}"
            continue
        return candidate
    raise BackendUnavailable(f"cgroup v2: {reason}")


def _mounts(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """Controller -> (mount point, root of the mount); "" is the v2 hierarchy."""
    found: dict[str, tuple[Path, str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        if kind == "cgroup2":
            found[""] = (Path(point), root)
        elif kind == "cgroup":
            for option in options.split(","):
                if option in CONTROLLERS:
                    found[option] = (Path(point), root)
    return found


def _own_paths(text: str) -> Iterable[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def create(directories: tuple[Path, ...], version: int, limits: CgroupLimits) -> None:
    """Make the directories and set every limit; fails closed (BackendUnavailable), leaving none."""
    try:
        for directory in directories:
            directory.mkdir()
        files = _v2_files(limits) if version == 2 else _v1_files(limits)
        for name, value in files.items():
            _write_limit(directories, name, value)
    except OSError as error:
        remove(directories)
        raise BackendUnavailable(
            f"cgroup limit cannot be set: {error.filename}: {error.strerror}"
        ) from error


def _v1_files(limits: CgroupLimits) -> dict[str, int | str]:
    return {
        "memory.limit_in_bytes": limits.memory_bytes,
        "memory.memsw.limit_in_bytes": limits.memory_bytes,
        "pids.max": limits.max_processes,
        "cpu.cfs_period_us": _PERIOD_US,
        "cpu.cfs_quota_us": int(limits.cpus * _PERIOD_US),
    }


def _v2_files(limits: CgroupLimits) -> dict[str, int | str]:
    return {
        "memory.max": limits.memory_bytes,
        "memory.swap.max": 0,
        "pids.max": limits.max_processes,
        "cpu.max": f"{int(limits.cpus * _PERIOD_US)} {_PERIOD_US}",
    }


_SWAP = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max"})
"""Absent when the kernel accounts no swap: fine without swap, a hole in the limit with it."""


def _write_limit(directories: tuple[Path, ...], name: str, value: int | str) -> None:
    holder = _holder(directories, name)
    if holder is not None:
        (holder / name).write_text(str(value))
    elif name not in _SWAP or _has_swap():
        raise FileNotFoundError(2, "no such limit file in the cgroup", name)


def _holder(directories: Iterable[Path], name: str) -> Path | None:
    return next((path for path in directories if (path / name).exists()), None)


def _has_swap(swaps: Path = Path("/proc/swaps")) -> bool:
    return len(swaps.read_text().splitlines()) > 1


def directories_of(proc: Path) -> tuple[tuple[Path, ...], int]:
    """Directories of a process's own cgroups (one per controller, or the v2 one), and the version;
    for a process in another cgroup namespace they are still named as this one sees them."""
    mounts = _mounts(Path("/proc/self/mountinfo").read_text())
    paths = dict(_own_paths((proc / "cgroup").read_text()))
    if all(controller in mounts for controller in CONTROLLERS):
        found = []
        for controller in CONTROLLERS:
            point, root = mounts[controller]
            found.append(point / os.path.relpath(paths[controller], root))
        return tuple(dict.fromkeys(found)), 1
    point, root = mounts[""]
    return (point / os.path.relpath(paths[""], root),), 2


def read_limits(directories: tuple[Path, ...], version: int) -> CgroupLimits:
    """The limits the kernel holds; BackendUnavailable when one is missing or unlimited."""

    def value(name: str) -> str:
        holder = _holder(directories, name)
        if holder is None:
            raise BackendUnavailable(f"cgroup v{version}: {directories[0]} has no {name}")
        return (holder / name).read_text().strip()

    if version == 2:
        quota, period = value("cpu.max").split()
        texts = [value("memory.max"), value("pids.max"), quota]
        swap_is_off = not _has_swap() or value("memory.swap.max") == "0"
    else:
        period = value("cpu.cfs_period_us")
        texts = [value("memory.limit_in_bytes"), value("pids.max"), value("cpu.cfs_quota_us")]
        swap_is_off = not _has_swap() or value("memory.memsw.limit_in_bytes") == texts[0]
    if not swap_is_off or not all(text.isdigit() for text in texts):
        raise BackendUnavailable(
            f"cgroup v{version}: limits are memory={texts[0]}, processes={texts[1]}, "
            f"cpu={texts[2]}, swap {'off' if swap_is_off else 'on'}; expected all of them set"
        )
    memory, processes, quota = (int(text) for text in texts)
    return CgroupLimits(memory, processes, quota / int(period))


def oom_kills(directories: Iterable[Path]) -> int:
    """Processes of the box the kernel killed for memory so far."""
    for directory in directories:
        for name in ("memory.events", "memory.oom_control"):
            file = directory / name
            if file.exists():
                for line in file.read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return 0


def kill_all(directories: Iterable[Path]) -> None:
    """SIGKILL everything in the cgroups."""
    for directory in directories:
        if (directory / "cgroup.kill").exists():
            (directory / "cgroup.kill").write_text("1")
            continue
        procs = directory / "cgroup.procs"
        if procs.exists():
            for pid in procs.read_text().split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended by itself


def remove(directories: Iterable[Path], timeout_s: float = 2.0) -> bool:
    """Remove the directories, waiting for the last processes to go; False if one stays."""
    deadline = time.monotonic() + timeout_s
    left = [directory for directory in directories if directory.exists()]
    while left:
        for directory in list(left):
            try:
                directory.rmdir()
                left.remove(directory)
            except FileNotFoundError:
                left.remove(directory)
            except OSError:  # busy: its processes are still dying
                if time.monotonic() > deadline:
                    return False
        if left:
            time.sleep(0.002)
    return True
