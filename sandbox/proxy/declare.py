"""``[metadata.parl.proxy]`` of a task folder -> WorldConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sandbox.proxy.config import WorldConfig
from sandbox.proxy.errors import ProxyConfigError

_PATHS = ("source", "document", "cassette", "simulator", "cwd")


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
