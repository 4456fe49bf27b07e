"""Removes what a dead owner's box left: processes, cgroups, directories, containers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from infra.owners import is_dead, process_owner
from sandbox.backends import cgroup
from sandbox.backends.processes import children_of, kill_if_there, marked_processes
from sandbox.errors import SandboxError

_WAIT_S = 5.0


class LeaseRecord(Protocol):
    """A lease row of kind ``sandbox.shelf.LEASE_KIND``."""

    @property
    def data_json(self) -> Mapping[str, Any]: ...


def process_host() -> str:
    """Name of this machine, boot and pid namespace, as lease owners carry it."""
    return process_owner().partition(":")[0]


def reap_lease(lease: LeaseRecord) -> None:
    """Handler for ``LeaseBook.reap({LEASE_KIND: reap_lease})``."""
    reap_box(lease.data_json)


def reap_box(data: Mapping[str, Any]) -> None:
    """Kill and remove everything the lease data names; nothing to do when it is all gone.

    The recorded process is killed only if its start time still matches; processes without a record
    (the owner died before it could write the pid) are found by their ``PARL_BOX`` variable.
    SandboxError when the box lives on another machine or something survives.
    """
    here = process_host()
    if data["host"] != here:
        raise SandboxError(
            f"box {data['box_id']} lives on {data['host']}, this is {here}; reap it there"
        )
    groups = [Path(path) for path in data["cgroups"]]
    deadline = time.monotonic() + _WAIT_S
    while True:
        left = _processes(data)
        for pid in left:
            kill_if_there(pid)
        cgroup.kill_all(groups)
        if not left and cgroup.remove(groups, timeout_s=0.05):
            break
        if time.monotonic() > deadline:
            raise SandboxError(
                f"box {data['box_id']}: pids {left} or cgroups {data['cgroups']} survived SIGKILL "
                f"for {_WAIT_S:g} s"
            )
        time.sleep(0.01)
    for path in data["directories"]:
        shutil.rmtree(path, ignore_errors=True)
    for name in data.get("gvisor", ()):
        from sandbox.backends.ray import reap_sandbox

        reap_sandbox(name)
    if containers := data.get("containers"):
        from sandbox.backends.docker_engine import connected, remove_container

        with connected() as client:
            for name in containers:
                remove_container(client, name)


def _processes(data: Mapping[str, Any]) -> list[int]:
    found = marked_processes(data["box_id"])
    recorded = data["process"]
    if recorded is not None and not is_dead(recorded):
        pid = int(recorded.split(":")[1])
        # the init of the box first, so that bwrap can still reap it
        found = [*children_of(pid), pid, *found]
    return list(dict.fromkeys(found))
