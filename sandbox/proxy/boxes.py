"""Boxes: where the programs of a task's author run, simulators and MCP servers over stdio.

A program gets a bubblewrap box of its own (level A, else B): no network unless an MCP server's
declaration says so, the system and its own installation read-only, /tmp of bounded size, a user of
its own, limits of memory and processes. With ``unsafe_local`` it runs on the host instead; without
bubblewrap it does not run.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import sandbox
from sandbox.backends import cgroup
from sandbox.backends.base import Level
from sandbox.backends.bubblewrap import BubblewrapBackend
from sandbox.backends.program_view import TASK_DIRECTORY, View
from sandbox.backends.wire import toolkit_source
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable
from sandbox.proxy.config import BoxesConfig, McpUpstream
from sandbox.proxy.guarded import ROOT, clean_environment, guarded, python_module

_WORKER = "sandbox.proxy.simulator_worker"
_SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64")))
_LAUNCHER = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from sandbox.proxy.box_launcher import main; main()"
)
_MODULES_FROM_STDIN = f"""
import json, os, sys, types
line = bytearray()
while not line.endswith(b"\\n"):
    byte = os.read(0, 1)
    if not byte:
        sys.exit(3)
    line += byte
for name, text in json.loads(line).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, f"<{{name}}>", "exec"), module.__dict__)
sys.modules[{_WORKER!r}].main()
"""
"""Registers our modules from text, as no file of ours is visible in a box."""


@dataclass(frozen=True, slots=True)
class Start:
    """How to start a program. ``greeting`` goes to its standard input first; ``boxed`` False: it
    runs on the host."""

    argv: list[str]
    env: dict[str, str]
    greeting: bytes = b""
    directory: Path | None = None
    boxed: bool = False
    cgroups: tuple[Path, ...] = field(default=())

    def swept(self) -> None:
        """Call when the program has ended: what its guard, killed itself, may have left."""
        cgroup.remove(self.cgroups, timeout_s=1.0)


class Boxes:
    """One for each proxy; cheap until the first program."""

    def __init__(self, config: BoxesConfig) -> None:
        self._config = config
        self._backend: BubblewrapBackend | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """BackendUnavailable, in one line, when programs cannot be boxed here. Takes 0.1 s once."""
        if not self._config.unsafe_local:
            self._boxes()

    def simulator(self, name: str) -> Start:
        """The worker of ``sandbox.proxy.simulator_worker`` for a source file of this name."""
        if self._config.unsafe_local:
            return Start(guarded(python_module(_WORKER, name)), clean_environment())
        interpreter = self._boxes().interpreter
        worker = Path(__file__).with_name("simulator_worker.py").read_text("utf-8")
        modules = {"sandbox": "", "sandbox.toolkit": toolkit_source(), _WORKER: worker}
        binds = tuple(path for path in interpreter.binds if not _is_system(path))
        environment = {}
        if interpreter.library_path is not None:
            environment["LD_LIBRARY_PATH"] = str(interpreter.library_path)
        return self._boxed(
            [str(interpreter.path), "-I", "-S", "-B", "-c", _MODULES_FROM_STDIN, name],
            View(binds=binds, covered=tuple(p for p in interpreter.hidden if not _is_system(p))),
            environment,
            greeting=json.dumps(modules).encode() + b"\n",
        )

    def server(
        self, config: McpUpstream, bound: dict[str, str], max_line_bytes: int | None = None
    ) -> Start:
        """An MCP server; ``bound`` secrets are added to its environment. BackendUnavailable names
        a program that is not there."""
        assert config.command is not None, "an MCP server over stdio has a command"
        if self._config.unsafe_local:
            environment = {**clean_environment(), **config.env, **bound}
            argv = guarded([config.command, *config.args], (), max_line_bytes)
            return Start(argv, environment, directory=config.cwd)
        command, shown = config.command, tuple(self._config.show)
        own = config.cwd is not None and "/" in command and (config.cwd / command).is_file()
        if not (own and not Path(command).is_absolute()):
            command = _found(command)
            shown += tuple(installation_of(Path(command)))
        view = View(
            binds=tuple(dict.fromkeys(shown)),
            covered=tuple(_parl_below(shown)),
            directory=None if config.cwd is None else config.cwd.resolve(),
            network=config.network,
        )
        words = [command, *config.args]
        return self._boxed(words, view, config.env, bound, max_line_bytes=max_line_bytes)

    def _boxed(
        self,
        command: Sequence[str],
        view: View,
        environment: dict[str, str],
        bound: dict[str, str] | None = None,
        greeting: bytes = b"",
        max_line_bytes: int | None = None,
    ) -> Start:
        """``environment`` is the author's: bwrap sets it for the program alone, the processes
        around the box never see it. Secrets must not stand in a command line."""
        box_id = secrets.token_hex(8)
        launch = self._boxes().of_program(box_id, command, view)
        setting = [
            word for name, value in environment.items() for word in ("--setenv", name, value)
        ]
        paths = [*view.binds, *([view.directory] if view.directory is not None else [])]
        plan = {
            "outer": list(launch.outer),
            "arguments": [*setting, *launch.arguments],
            "command": list(launch.command),
            "seccomp": base64.b64encode(launch.seccomp).decode(),
            "cgroups": [str(path) for path in launch.cgroups],
            "version": launch.cgroup_version,
            "limits": asdict(launch.limits),
            "paths": [str(path) for path in paths],
        }
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(ROOT), json.dumps(plan)]
        return Start(
            guarded(launcher, launch.cgroups, max_line_bytes),
            {**clean_environment(), **(bound or {})},
            greeting=greeting,
            boxed=True,
            cgroups=launch.cgroups,
        )

    def _boxes(self) -> BubblewrapBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._opened()
            return self._backend

    def _opened(self) -> BubblewrapBackend:
        config = self._config
        sizes = SandboxConfig(
            memory_mib=config.memory_mib,
            disk_mib=config.disk_mib,
            cpus=config.cpus,
            max_processes=config.max_processes,
            max_open_files=config.max_open_files,
        )
        levels = (Level.A, Level.B) if config.level == "auto" else (Level(config.level),)
        reasons = []
        for level in levels:
            try:
                return BubblewrapBackend(sizes, level)
            except BackendUnavailable as error:
                reasons.append(str(error))
        raise BackendUnavailable(
            "simulators and MCP servers of a task run in a bubblewrap box, which cannot be had "
            f"here ({'; '.join(dict.fromkeys(reasons))}); or set unsafe_local = true for code you "
            "would run yourself"
        )


def installation_of(program: Path) -> list[Path]:
    """What a program needs beside the system: where it, the links on the way to it and its script's
    interpreter are installed. BackendUnavailable for a file that is gone.

    Of an installation (PREFIX/bin beside PREFIX/lib) only bin and lib: a prefix may be a home.
    """
    found: list[Path] = []
    left = [program]
    while left:
        path = left.pop()
        if path in found or _is_system(path):
            continue
        prefix = path.parents[1] if len(path.parents) > 1 else path
        if path.parent.name == "bin" and (prefix / "lib").is_dir():
            parts = [prefix / part for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
            found += [part for part in parts if part.exists() and part not in found]
        else:
            found.append(path)
        if path.is_symlink():
            left.append(Path(os.path.normpath(path.parent / path.readlink())))
        else:
            left += _interpreter_of(path)
    return found


def _interpreter_of(script: Path) -> list[Path]:
    try:
        with script.open("rb") as file:
            first = file.readline(512)
    except OSError as error:
        raise BackendUnavailable(f"program {script}: {error.strerror}") from None
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        named = shutil.which(words[1]) if len(words) > 1 else None
        return [Path(named)] if named is not None else []
    return [Path(words[0])] if words else []


def _found(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise BackendUnavailable(
            f"the MCP server's command {command!r} is not installed here; install it, or give the "
            f"path of one in cwd, which the box shows as {TASK_DIRECTORY}"
        )
    # its links stay: a virtual environment is one
    return str(Path.cwd() / path)


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(directory) for directory in _SYSTEM)


def _parl_below(shown: Sequence[Path]) -> list[Path]:
    """PARL's own packages among what is shown: the answers and verifiers of shipped tasks."""
    packages = [Path(entry) for entry in sandbox.__path__]
    roots = [Path(entry).parent for entry in sandbox.__path__]
    packages += [root / name for root in roots for name in ("parl", "reward_models", "engine")]
    return [
        package
        for package in dict.fromkeys(packages)
        if package.is_dir() and any(package.is_relative_to(path) for path in shown)
    ]
