"""What a box shows to a program that is not ours: an MCP server, a simulator.

Read-only: the system's programs and libraries, the program's own installation, and what the
operator names. Writable: /tmp, of bounded size. Nothing of /home, /root, /etc (but what libraries
read) or of the task's folder, unless named.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.backends.cgroup import CgroupLimits

TASK_DIRECTORY = "/task"
"""Where ``View.directory`` lies in the box: the host's path is nobody's business."""
_ETC = ("ld.so.cache", "localtime", "mime.types")
_ETC_NETWORK = (
    *("resolv.conf", "hosts", "nsswitch.conf", "gai.conf", "services"),
    *("ssl", "pki", "ca-certificates"),
)


@dataclass(frozen=True, slots=True)
class View:
    """``binds``: host paths, read-only at the same place; ``covered``: directories below them to
    cover up; ``directory``: the program's working directory, read-only; ``network``: the host's."""

    binds: tuple[Path, ...] = ()
    covered: tuple[Path, ...] = ()
    directory: Path | None = None
    network: bool = False


@dataclass(frozen=True, slots=True)
class ProgramLaunch:
    """A box to be started: ``outer`` joins the cgroups and drops privileges, ``arguments`` and
    ``seccomp`` reach bwrap by file descriptors, ``command`` runs inside."""

    outer: Sequence[str]
    arguments: Sequence[str]
    command: Sequence[str]
    seccomp: bytes
    cgroups: tuple[Path, ...]
    cgroup_version: int
    limits: CgroupLimits


def program_files(view: View, disk_bytes: int) -> list[str]:
    """bwrap's arguments of the box's file system, from the root up."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    for name in (*_ETC, *(_ETC_NETWORK if view.network else ())):
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, target in alternatives((Path("/usr/bin"), Path("/usr/sbin"), Path("/usr/lib"))):
        arguments += ["--symlink", target, name]
    # before the binds: some may lie below it
    arguments += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp"]
    for path in view.binds:
        arguments += ["--ro-bind", str(path), str(path)]
    for path in view.covered:
        arguments += ["--tmpfs", str(path), "--remount-ro", str(path)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    start = "/tmp"
    if view.directory is not None:
        arguments += ["--ro-bind", str(view.directory), TASK_DIRECTORY]
        start = TASK_DIRECTORY
    return [*arguments, "--chdir", start, "--remount-ro", "/"]


@functools.cache
def alternatives(binds: tuple[Path, ...]) -> list[tuple[str, str]]:
    """(name, target) of the links that Debian's /usr/bin/awk, which, vi and others go through.

    Only those into what the box shows: the folder itself may name other places of the host.
    """
    found = []
    for link in sorted(Path("/etc/alternatives").glob("*")):
        target = link.readlink() if link.is_symlink() else None
        if target is None or "man" in target.parts:
            continue
        if any(target.is_relative_to(bind) for bind in binds):
            found.append((str(link), str(target)))
    return found
