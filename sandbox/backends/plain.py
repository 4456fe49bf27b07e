"""Level C: a plain subprocess. No isolation; only with ``unsafe_local``."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from pathlib import Path

from sandbox.backends.base import Level
from sandbox.backends.bubblewrap import NUM_SLOTS
from sandbox.backends.enforced import process_limits
from sandbox.backends.interpreter import find_interpreter
from sandbox.backends.process_box import Launch, ProcessBox, open_box
from sandbox.backends.program import BoxProgram
from sandbox.backends.wire import BOOTSTRAP
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable


class SubprocessBackend:
    """Promises a deadline, a process group, per-process limits and a clean environment. As root it
    still drops to a uid of its own. A process that leaves the group outlives the box."""

    level = Level.C

    def __init__(self, config: SandboxConfig) -> None:
        """BackendUnavailable unless ``config.unsafe_local``."""
        if not config.unsafe_local:
            raise BackendUnavailable(
                "level C isolates nothing: set unsafe_local = true to run trusted tasks with it, "
                "or install bubblewrap"
            )
        self._config = config
        self._interpreter = find_interpreter()

    def footprint(self, box_id: str) -> dict[str, list[str]]:
        """The working directory, known before it exists."""
        return {"cgroups": [], "directories": [str(_directory(box_id))]}

    async def open(self, box_id: str, program: BoxProgram, owner: str = "") -> ProcessBox:
        """Start a box in a directory of its own."""
        uid = None
        directory = _directory(box_id)
        directory.mkdir(mode=0o700)
        if os.geteuid() == 0:
            uid = self._config.uid_base + secrets.randbelow(NUM_SLOTS)
            os.chown(directory, uid, uid)
        ours, theirs = socket.socketpair()
        python = [str(self._interpreter.path), "-I", "-S", "-B", "-c"]
        fd = theirs.detach()
        launch = Launch(
            argv=[*python, BOOTSTRAP, str(fd), str(fd)],
            level=Level.C,
            env={
                "PARL_BOX": box_id,
                "PATH": "/usr/bin:/bin",
                "HOME": str(directory),
                "TMPDIR": str(directory),
                "LANG": "C.UTF-8",
            },
            fds=(fd,),
            uid=uid,
            directories=(directory,),
            enforced=process_limits(self._config, Level.C, os.geteuid() if uid is None else uid),
        )
        hello = program.hello(self._config, Level.C, str(directory))
        return await open_box(box_id, launch, ours, hello, self._config.start_timeout_s)


def _directory(box_id: str) -> Path:
    return Path(tempfile.gettempdir()) / f"parl-box-{box_id}"
