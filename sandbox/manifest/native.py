"""A plain Harbor ``task.toml`` (1.0 to 1.4, written for any runner) -> Manifest and downgrades.

Files with ``[metadata.parl]`` are held to our rules (sandbox.manifest.reading); these are taken as
they are, with what a box does not give them said in one line each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest
from sandbox.manifest.reading import explain, read_toml

_UNITS = {"": 1 / (1 << 20), "k": 1 / (1 << 10), "m": 1, "g": 1 << 10, "t": 1 << 20}
MAX_CALL_TIMEOUT_S = 120.0
_HOST_VARIABLE = re.compile(r"\$\{\w+(?::-([^}]*))?\}")


def is_native(path: Path) -> bool:
    """Whether the file has no ``[metadata.parl]``."""
    metadata = read_toml(path).get("metadata", {})
    return not (isinstance(metadata, dict) and "parl" in metadata)


def load_native(path: Path) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest with the defaults of ``[metadata.parl]`` added, and every downgrade."""
    data = read_toml(path)
    notes: list[str] = []
    if "version" in data and "schema_version" not in data:
        data["schema_version"] = data.pop("version")
    data.pop("dataset", None)
    task = data.setdefault("task", {})
    if isinstance(task, dict) and "name" not in task:
        task["name"] = f"local/{slug(path.resolve().parent.name)}"
        notes.append(f"[task] has no name: it is called {task['name']}")
    environment = data.setdefault("environment", {})
    _sizes(environment, path, notes)
    _network(data, notes)
    _variables(data, notes)
    if data.get("steps"):
        raise TaskError(f"{path}: steps: tasks of several steps cannot be run; split the task")
    metadata = data.setdefault("metadata", {})
    timeout_s = data.get("agent", {}).get("timeout_sec") or MAX_CALL_TIMEOUT_S
    metadata["parl"] = {
        "task_type": str(metadata.get("category") or str(task["name"]).split("/")[-1]),
        "budget": {"call_timeout_s": float(min(timeout_s, MAX_CALL_TIMEOUT_S))},
    }
    try:
        return Manifest.model_validate(data), tuple(notes)
    except ValidationError as error:
        raise TaskError(f"{path}: {explain(error, Manifest)}") from error


def slug(text: str) -> str:
    """``text`` as one part of a task name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "task"


def _sizes(environment: dict[str, Any], path: Path, notes: list[str]) -> None:
    """``memory = "2G"`` of Harbor < 1.2 -> ``memory_mb``."""
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        text = environment.pop(old, None)
        if text is None or new in environment:
            continue
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(text).lower())
        if found is None:
            raise TaskError(f"{path}: environment.{old} = {text!r}: expected a size like '2G'")
        environment[new] = max(1, int(float(found[1]) * _UNITS[found[2]]))
        notes.append(
            f"environment.{old} = {text!r} is written {new} = {environment[new]} since 1.2"
        )
    if environment.get("gpus"):
        notes.append(f"environment.gpus = {environment['gpus']}: a box has no GPU")


def _variables(data: dict[str, Any], notes: list[str]) -> None:
    """``${VAR}`` and ``${VAR:-default}`` name the host's variables, which enter no box."""
    for section in ("environment", "verifier", "solution"):
        table = data.get(section)
        env = table.get("env") if isinstance(table, dict) else None
        if not isinstance(env, dict):
            continue
        for name, value in env.items():
            if isinstance(value, str) and (found := _HOST_VARIABLE.fullmatch(value)):
                env[name] = found[1] or ""
                notes.append(
                    f"{section}.env.{name} = {value}: variables of the host enter no box; it is "
                    f"{env[name]!r}"
                )


def _network(data: dict[str, Any], notes: list[str]) -> None:
    environment = data["environment"]
    allowed = environment.pop("allow_internet", None)
    mode = environment.get("network_mode")
    if allowed or mode in ("public", "allowlist"):
        notes.append("environment: the network is off in a box")
    environment["network_mode"] = "no-network"
    environment.pop("allowed_hosts", None)
    agent = data.get("agent", {})
    if agent.pop("network_mode", "no-network") != "no-network":
        notes.append("agent.network_mode: the network is off in a box")
    if agent.get("user") not in (None, "nobody"):
        notes.append(f"agent.user = {agent['user']!r}: the agent is an unprivileged user")
    verifier = data.setdefault("verifier", {})
    if verifier.get("network_mode", "no-network") != "no-network":
        notes.append("verifier.network_mode: the verifier has no network")
    verifier["network_mode"] = "no-network"
    if verifier.get("environment_mode") == "shared":
        notes.append("verifier.environment_mode = 'shared': tests run in a box of their own")
    verifier["environment_mode"] = "separate"
    if verifier.pop("environment", None) is not None:
        notes.append("verifier.environment: its image is not used")
    if verifier.pop("collect", None):
        notes.append("verifier.collect: commands are not run")
    if environment.get("mcp_servers"):
        notes.append("environment.mcp_servers: not started; give the task tools/tools.py")
    if environment.get("healthcheck"):
        notes.append("environment.healthcheck: not run")
