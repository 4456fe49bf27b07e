"""Settings of the sandbox: which isolation, how large a box."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DockerSection(BaseModel):
    """Images of tasks at level docker. Nothing is ever pulled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_images: dict[str, str] = {}
    """Image as a Dockerfile or task.toml names it -> image on this engine, for instance
    ``{"python:3.12-slim" = "mirror/python:3.12"}``. One that is not here is taken by its own name,
    if the engine has it."""
    writable: tuple[str, ...] = ()
    """Folders of images that tasks may write beside their own, for instance ("/etc",)."""
    allow_network: bool = False
    """A task that asks for a public network gets the engine's bridge; else none, and a note."""
    build_memory_mib: int = Field(default=2048, ge=64)
    keep_days: float = Field(default=7.0, gt=0)
    """A built image that was not used for so long is removed at the next build."""

    def __hash__(self) -> int:
        """Of the content: pools are kept by their settings, and a dict has no hash."""
        return hash(self.model_dump_json())


class SandboxConfig(BaseModel):
    """``level`` "auto" takes the best level that can be enforced here (A, then B); C is never
    chosen unless ``unsafe_local`` is set, docker and ray (gVisor) only by name. Sizes are MiB."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["auto", "A", "B", "C", "docker", "ray"] = "auto"
    unsafe_local: bool = False
    """Allow level C, and simulators of a task's author in the proxy of this process: no isolation,
    only for code you would run yourself."""
    memory_mib: int = Field(default=256, ge=32)
    """Levels A, docker: of the whole box (tmpfs included). Else: address space of each process."""
    disk_mib: int = Field(default=16, ge=1)
    """Size of the working directory (levels A, B, docker) and of the largest file (all levels)."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU share of the whole box; level A and docker only."""
    max_processes: int = Field(default=32, ge=4)
    max_open_files: int = Field(default=64, ge=16)
    cpu_s: int = Field(default=60, ge=1)
    """CPU seconds of one process."""
    start_timeout_s: float = Field(default=15.0, gt=0)
    uid_base: int = Field(default=200000, ge=1000)
    """When started as root, a box runs as uid_base + slot."""
    image: str | None = None
    """docker: another image than our base, pinned (NAME@sha256:... or an id) and already on the
    engine, with Python 3.11 or later at ``image_python``."""
    image_python: str = "/usr/bin/python3"
    docker: DockerSection = DockerSection()
    run: str = ""
    """docker: run id, for the container's label."""
    max_age_s: float = Field(default=24 * 3600.0, gt=3600)
    """docker: anybody may remove an older container; boxes retire an hour before."""
    allow_live: bool = False
    """Tools behind the proxy may reach real APIs (modes record, live_read and live)."""
    proxy_socket: Path | None = None
    """Control socket of the node's `python -m sandbox.proxy`; None = a proxy in this process, made
    when the first task asks for one."""
    proxy_file: Path | None = None
    """The operator's proxy.toml (secrets, quotas, network) for the proxy in this process."""
    proxy_dir: Path | None = None
    """Where the proxy in this process keeps audit log and journal, a folder for each pool; None = a
    temporary one, removed at the end."""

    @model_validator(mode="after")
    def _one_proxy(self) -> Self:
        if self.proxy_socket is not None and self.proxy_file is not None:
            raise ValueError(
                "proxy_socket and proxy_file are both set; the proxy at the socket has a "
                "configuration of its own, drop proxy_file"
            )
        return self
