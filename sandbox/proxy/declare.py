"""``[metadata.parl.proxy]`` of a task folder -> WorldConfig and ProxySpec."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from sandbox.proxy.config import (
    UPSTREAM_MODES,
    McpUpstream,
    Mode,
    PythonUpstream,
    UpstreamConfig,
    WorldConfig,
)
from sandbox.proxy.errors import ProxyConfigError
from sandbox.tool_spec import STRICT

_PATHS = ("source", "document", "cassette", "simulator", "cwd")
_FILES = ("source", "document", "cassette", "simulator")


@dataclass(frozen=True, config=STRICT)
class ProxySpec:
    """The tools of a task that the proxy serves.

    ``section``: the author's, with a mode for every upstream. ``folder`` is where its paths start;
    the same task elsewhere is the same task. ``modes``: tool -> mode. ``files``: declared path ->
    sha256 of its content, "" for a cassette that is still to be recorded.
    """

    section: dict[str, Any]
    folder: str
    modes: dict[str, Mode]
    files: dict[str, str] = Field(default_factory=dict)

    @cached_property
    def world(self) -> WorldConfig:
        """What the proxy loads. ProxyConfigError."""
        return world_of_section(self.section, Path(self.folder))

    @cached_property
    def world_name(self) -> str:
        """Equal for equal content in one folder, so that tasks share what is loaded."""
        parts = [self.section, str(Path(self.folder).resolve()), self.files]
        return f"task-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}"

    @property
    def live(self) -> dict[str, Mode]:
        """Tools that reach a real API."""
        return {tool: mode for tool, mode in self.modes.items() if mode in UPSTREAM_MODES}

    @property
    def simulates(self) -> bool:
        """Whether the author's Python runs beside the proxy, outside any box."""
        return any(
            isinstance(upstream, PythonUpstream) or upstream.simulator is not None
            for upstream in self.world.upstreams.values()
        )


def mode_of(upstream: UpstreamConfig) -> Mode:
    """The author's mode; else the offline one that the upstream has: never the node's default,
    which may be a live one."""
    if upstream.mode is not None:
        return upstream.mode
    if isinstance(upstream, PythonUpstream):
        return "simulate"
    return "simulate" if upstream.cassette is None and upstream.simulator else "replay"


def without_servers(name: str, upstream: UpstreamConfig) -> UpstreamConfig:
    """The upstream as it can be listed offline. ProxyConfigError for an MCP server whose tools
    nobody recorded."""
    if not isinstance(upstream, McpUpstream):
        return upstream
    if upstream.cassette is None and upstream.simulator is None:
        raise ProxyConfigError(
            f"upstreams.{name}: only its server knows its tools; set cassette and record the task"
        )
    tools = {key: tool.model_copy(update={"mode": None}) for key, tool in upstream.tools.items()}
    mode = "simulate" if upstream.cassette is None else "replay"
    return upstream.model_copy(update={"mode": mode, "tools": tools})


def recording(section: dict[str, Any]) -> dict[str, Any]:
    """The section with mode record for everything that has a cassette."""
    upstreams = section.get("upstreams", {})
    changed: dict[str, Any] = {}
    for name, table in upstreams.items() if isinstance(upstreams, dict) else ():
        changed[name] = table
        if isinstance(table, dict) and "cassette" in table and table.get("kind") != "python":
            tools = table.get("tools", {})
            if isinstance(tools, dict):
                tools = {
                    key: {k: v for k, v in tool.items() if k != "mode"}
                    if isinstance(tool, dict)
                    else tool
                    for key, tool in tools.items()
                }
            changed[name] = {**table, "mode": "record", "tools": tools}
    return {**section, "upstreams": changed}


def world_of_section(section: dict[str, Any], folder: Path) -> WorldConfig:
    """The world a task declares; its paths are relative to the task's folder and may not leave it.

    ProxyConfigError names file, key and what was expected.
    """
    place = f"{folder / 'task.toml'}: metadata.parl.proxy"
    upstreams = section.get("upstreams", {})
    if not isinstance(upstreams, dict):
        raise ProxyConfigError(f"{place}.upstreams: expected a table of upstreams")
    resolved = {
        name: _resolved(value, folder, f"{place}.upstreams.{name}")
        for name, value in upstreams.items()
    }
    try:
        return WorldConfig.model_validate({**section, "upstreams": resolved})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ProxyConfigError(f"{place}: key {key!r}: {first['msg']}") from None


def declared_files(section: dict[str, Any], folder: Path) -> dict[str, str]:
    """Declared path -> sha256 (64 hex digits). ProxyConfigError for a file that is missing, but a
    cassette may be."""
    found: dict[str, str] = {}
    for name, upstream in sorted(section.get("upstreams", {}).items()):
        for key in _FILES:
            declared = upstream.get(key)
            if declared is None:
                continue
            path = folder / declared
            if path.is_file():
                found[declared] = hashlib.sha256(path.read_bytes()).hexdigest()
            elif key == "cassette":
                found[declared] = ""
            else:
                raise ProxyConfigError(
                    f"{folder / 'task.toml'}: metadata.parl.proxy.upstreams.{name}.{key}: there is "
                    f"no file {declared!r} in the task folder"
                )
    return found


def _resolved(upstream: Any, folder: Path, place: str) -> Any:
    if not isinstance(upstream, dict):
        return upstream
    out = dict(upstream)
    for key in _PATHS:
        if isinstance(out.get(key), str):
            path = folder / out[key]
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ProxyConfigError(f"{place}.{key}: {out[key]!r} leads out of the task folder")
            out[key] = path
    return out
