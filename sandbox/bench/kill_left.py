"""What is left of killed processes: seen just before the kill, looked for afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.owners import LeaseError, is_dead, process_owner
from infra.processes import environments
from sandbox.backends import cgroup
from sandbox.backends.processes import marked_processes
from sandbox.bench.kill_task import ROLE_VARIABLE, STATE_FILE, mark_of
from sandbox.bench.kill_victim import temporary


@dataclass(slots=True)
class Left:
    """What exists of some victims and their boxes."""

    processes: list[str] = field(default_factory=list)
    """Pid and command."""
    cgroups: list[str] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """By kind."""
        return {name: len(set(getattr(self, name))) for name in self.__slots__}

    def __bool__(self) -> bool:
        return any(self.counts.values())


@dataclass(slots=True)
class Tree:
    """A victim and all that it started, as long as its parents live."""

    owners: set[str] = field(default_factory=set)
    """As ``infra.owners`` names processes: a later one with the same number is another one."""
    cgroups: set[str] = field(default_factory=set)

    def add(self, pid: int) -> None:
        """What runs below ``pid`` now."""
        for member in (pid, *descendants(pid)):
            try:
                self.owners.add(process_owner(member))
                directories, _ = cgroup.directories_of(Path(f"/proc/{member}"))
            except (LeaseError, OSError):  # it ended meanwhile
                continue
            self.cgroups |= {str(path) for path in directories if path.name.startswith("parl-")}


def descendants(pid: int) -> Iterator[int]:
    """Children of every thread, and theirs."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the thread ended
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def left_of(
    folder: Path, dead: Sequence[str], tree: Tree, footprints: Sequence[Mapping[str, Any]]
) -> Left:
    """Everything on this machine that belongs to the dead roles, to the processes of ``tree`` or
    to the boxes of these leases."""
    left = Left()
    pids = {int(owner.split(":")[1]) for owner in tree.owners if not is_dead(owner)}
    pids |= set(_marked(folder, dead))
    left.cgroups += [path for path in tree.cgroups if Path(path).exists()]
    for role in dead:
        left.directories += map(str, temporary(folder, role).iterdir())
        # not rglob, which cannot bear that folders vanish meanwhile
        for parent, _, names in os.walk(temporary(folder, "proxy")):
            found = (name for name in names if name.endswith(STATE_FILE + role))
            left.directories += [f"{parent}/{name}" for name in found]
    mountinfo = Path("/proc/self/mountinfo").read_text().splitlines()
    left.mounts += [line for line in mountinfo if str(folder) in line]
    for data in footprints:
        box_id = data["box_id"]
        pids |= set(marked_processes(box_id))
        left.cgroups += [path for path in data["cgroups"] if Path(path).exists()]
        left.directories += [path for path in data["directories"] if Path(path).exists()]
        left.mounts += [line for line in mountinfo if box_id in line]
        if names := data.get("containers"):
            left.containers += _containers(names)
    left.processes = [f"{pid} {_command(pid)}" for pid in sorted(pids)]
    return left


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "that has just ended"
    return " ".join(repr(word.decode("utf-8", "replace"))[1:-1] for word in words)[:200]


def _marked(folder: Path, dead: Sequence[str]) -> Iterator[int]:
    """Processes that carry a dead role's temporary folder or mark."""
    below = [os.fsencode(f"TMPDIR={temporary(folder, role)}") for role in dead]
    names = {f"{ROLE_VARIABLE}={mark_of(folder, role)}".encode() for role in dead}
    for pid, entries in environments():
        if not names.isdisjoint(entries) or any(e.startswith(tuple(below)) for e in entries):
            yield pid


def _containers(names: list[str]) -> Iterator[str]:
    from sandbox.backends.docker_engine import connected

    with connected() as client:
        for found in client.api.containers(all=True, filters={"name": names}):
            yield found["Names"][0]
