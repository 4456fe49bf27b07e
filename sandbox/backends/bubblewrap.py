"""Levels A and B: bubblewrap, with and without cgroup limits.

The chain is ``sh`` (joins the cgroups), ``setpriv`` (parent-death signal, own uid), ``bwrap``,
Python; each by exec in the same process, so there is no moment without limits. bwrap's arguments
come by fd: /proc/1/cmdline inside shows no host path (facts/sandboxes.md 5.2).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.backends import cgroup, enforced, seccomp
from sandbox.backends.base import Level
from sandbox.backends.interpreter import Interpreter, find_interpreter
from sandbox.backends.process_box import Launch, ProcessBox, open_box
from sandbox.backends.program import MIB, BoxProgram
from sandbox.backends.program_view import ProgramLaunch, View, alternatives, program_files
from sandbox.backends.wire import BOOTSTRAP
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable

WORKDIR = "/box"
NUM_SLOTS = 60000
_INNER_UID = "1000"
_JOIN = (
    'n=$1; shift; while [ "$n" -gt 0 ]; do '
    'echo $$ > "$1" || exit 71; shift; n=$((n-1)); done; exec "$@"'
)
_EXTRA_PROCESSES = 3
"""bwrap outside, the agent and the worker count against pids.max."""


class BubblewrapBackend:
    """Opens boxes of level A or B. Construction checks that every limit can really be enforced."""

    def __init__(self, config: SandboxConfig, level: Level) -> None:
        """BackendUnavailable in one line: what is missing and what to install or change."""
        assert level in (Level.A, Level.B), f"bubblewrap gives levels A and B, not {level}"
        self.level = level
        self._config = config
        self._bwrap = _need("bwrap", "bubblewrap")
        self._setpriv = _need("setpriv", "util-linux")
        self._interpreter = find_interpreter()
        self._seccomp = seccomp.program()
        self._disable_userns = "--disable-userns" in _help(self._bwrap)
        if "--size" not in _help(self._bwrap):
            raise BackendUnavailable("bwrap has no --size: install bubblewrap >= 0.8")
        self._parents = cgroup.find_parents() if level is Level.A else None
        self._try_out()

    def footprint(self, box_id: str) -> dict[str, list[str]]:
        """What a box of this id will own outside itself; recorded in its lease before it exists."""
        return {"cgroups": [str(path) for path in self._cgroups(box_id)], "directories": []}

    async def open(self, box_id: str, program: BoxProgram, owner: str = "") -> ProcessBox:
        """Start a box and load the program; SandboxLost if it does not come up in time. ``owner``
        is in the box's lease; nothing in the box names it."""
        ours, theirs = socket.socketpair()
        command = [*self._python(), BOOTSTRAP, *[str(theirs.fileno())] * 2]
        try:
            launch = self._launch(box_id, command, theirs.detach())
        except BaseException:
            ours.close()
            raise
        hello = program.hello(self._config, self.level, WORKDIR)
        return await open_box(box_id, launch, ours, hello, self._config.start_timeout_s)

    def _python(self) -> list[str]:
        return [str(self._interpreter.path), "-I", "-S", "-B", "-c"]

    def _cgroups(self, box_id: str) -> tuple[Path, ...]:
        return () if self._parents is None else self._parents.of(box_id)

    def _launch(self, box_id: str, command: list[str], *fds: int) -> Launch:
        """Create the cgroups and put the chain together; takes ownership of ``fds``."""
        groups = self._cgroups(box_id)
        if self._parents is not None:
            try:
                cgroup.create(groups, self._parents.version, self._limits())
            except BackendUnavailable:
                for fd in fds:
                    os.close(fd)
                raise
        filter_fd = _memory_file(self._seccomp)
        arguments = [*self._box_arguments(box_id), "--seccomp", str(filter_fd)]
        arguments_fd = _memory_file(b"".join(text.encode() + b"\0" for text in arguments))
        outer, user = self._outer(groups)
        return Launch(
            argv=[*outer, "--args", str(arguments_fd), "--", *command],
            level=self.level,
            env={"PARL_BOX": box_id, "PATH": "/usr/bin:/bin"},
            fds=(*fds, filter_fd, arguments_fd),
            cgroups=groups,
            enforced=self._record(groups, user),
        )

    def of_program(self, box_id: str, command: Sequence[str], view: View) -> ProgramLaunch:
        """A box for a program that speaks over its standard streams and keeps the environment it is
        given; nothing exists before ``ProgramLaunch`` is carried out."""
        groups = self._cgroups(box_id)
        outer, _ = self._outer(groups)
        limits = {
            "--core": 0,
            "--nofile": self._config.max_open_files,
            "--fsize": self._config.disk_mib * MIB,
        }
        if self.level is Level.B:
            limits |= {
                "--as": self._config.memory_mib * MIB,
                "--nproc": self._config.max_processes,
            }
        within = [_need("prlimit", "util-linux")]
        within += [f"{name}={value}:{value}" for name, value in limits.items()]
        arguments = self._namespaces(network=view.network)
        arguments += program_files(view, self._config.disk_mib * MIB)
        for name, value in (("PARL_BOX", box_id), ("HOME", "/tmp"), ("TMPDIR", "/tmp")):
            arguments += ["--setenv", name, value]
        return ProgramLaunch(
            outer=outer,
            arguments=arguments,
            command=[*within, "--", *command],
            seccomp=self._seccomp,
            cgroups=groups,
            cgroup_version=0 if self._parents is None else self._parents.version,
            limits=self._limits(),
        )

    @property
    def interpreter(self) -> Interpreter:
        """The Python that boxes of this backend run."""
        return self._interpreter

    def _limits(self) -> cgroup.CgroupLimits:
        return cgroup.CgroupLimits(
            memory_bytes=self._config.memory_mib * MIB,
            max_processes=self._config.max_processes + _EXTRA_PROCESSES,
            cpus=self._config.cpus,
        )

    def _outer(self, groups: tuple[Path, ...]) -> tuple[list[str], int]:
        """The chain up to bwrap, and the user it runs as."""
        privileges = [self._setpriv, "--pdeathsig", "KILL"]
        user = os.geteuid()
        if user == 0:
            user = self._config.uid_base + secrets.randbelow(NUM_SLOTS)
            privileges += ["--reuid", str(user), "--regid", str(user), "--clear-groups"]
        procs = [str(group / "cgroup.procs") for group in groups]
        joining = ["/bin/sh", "-c", _JOIN, "box", str(len(procs)), *procs]
        return [*joining, *privileges, self._bwrap], user

    def _record(self, groups: tuple[Path, ...], user: int) -> dict[str, Any]:
        """What holds, with the cgroup's limits read back from its files."""
        record = enforced.process_limits(self._config, self.level, user)
        record |= enforced.isolation(self._config, seccomp="deny-list")
        if self._parents is not None:
            found = cgroup.read_limits(groups, self._parents.version)
            record |= enforced.group_limits(found.memory_bytes, found.cpus, self._parents.version)
        return record

    def _box_arguments(self, box_id: str) -> list[str]:
        """Namespaces, then the file system from the root up, then the environment."""
        # as init of its pid namespace the agent cannot be killed or stopped from inside
        arguments = [*self._namespaces(), "--as-pid-1"]
        arguments += _file_system(self._interpreter, self._config.disk_mib * MIB)
        environment = {
            "PARL_BOX": box_id,
            "PATH": "/usr/bin:/bin",
            "HOME": WORKDIR,
            "TMPDIR": WORKDIR,
            "LANG": "C.UTF-8",
        }
        if self._interpreter.library_path is not None:
            environment["LD_LIBRARY_PATH"] = str(self._interpreter.library_path)
        arguments.append("--clearenv")
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        return arguments

    def _namespaces(self, network: bool = False) -> list[str]:
        arguments = ["--unshare-user", "--unshare-pid", "--unshare-ipc"]
        arguments += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "box"]
        arguments += ["--uid", _INNER_UID, "--gid", _INNER_UID, "--cap-drop", "ALL"]
        arguments += ["--die-with-parent", "--new-session"]
        if not network:
            arguments.append("--unshare-net")
        if self._disable_userns:
            arguments.append("--disable-userns")
        return arguments

    def _try_out(self) -> None:
        """Run one empty box; the message of whatever refuses becomes the reason."""
        box_id = f"probe-{secrets.token_hex(8)}"
        launch = self._launch(box_id, [*self._python(), "import sqlite3, ctypes, resource"])
        try:
            done = subprocess.run(
                launch.argv,
                env=launch.env,
                pass_fds=launch.fds,
                capture_output=True,
                text=True,
                timeout=self._config.start_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BackendUnavailable(
                f"level {self.level}: an empty box did not end within "
                f"{self._config.start_timeout_s:g} s"
            ) from error
        finally:
            for fd in launch.fds:
                os.close(fd)
            cgroup.remove(launch.cgroups)
        if done.returncode != 0:
            words = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise BackendUnavailable(
                f"level {self.level}: an empty box does not start: {words} (user namespaces "
                "allowed? see kernel.unprivileged_userns_clone, user.max_user_namespaces)"
            )


def _file_system(interpreter: Interpreter, disk_bytes: int) -> list[str]:
    """Read-only system directories; one writable, size-capped tmpfs; everything else read-only."""
    arguments: list[str] = []
    for path in interpreter.binds:
        arguments += ["--ro-bind", str(path), str(path)]
    for path in interpreter.hidden:
        arguments += ["--tmpfs", str(path), "--remount-ro", str(path)]
    for path, target in interpreter.links:
        arguments += ["--symlink", target, str(path)]
    for name, target in alternatives(interpreter.binds):
        arguments += ["--symlink", target, name]
    arguments += ["--symlink", "usr/bin", "/bin", "--proc", "/proc"]
    arguments += ["--dev", "/dev", "--remount-ro", "/dev"]
    arguments += ["--perms", "0700", "--size", str(disk_bytes), "--tmpfs", WORKDIR]
    arguments += ["--symlink", WORKDIR.lstrip("/"), "/tmp", "--chdir", WORKDIR]
    return [*arguments, "--remount-ro", "/"]


def _memory_file(content: bytes) -> int:
    """An anonymous file with ``content``, at its start."""
    fd = os.memfd_create("parl", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _need(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise BackendUnavailable(f"{program} is not installed: apt-get install {package}")
    return path


def _help(bwrap: str) -> str:
    done = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
