"""Options of ``parl task`` commands that may reach real APIs through the proxy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.errors import ConfigError

if TYPE_CHECKING:
    from sandbox.config import SandboxConfig

AllowLive = Annotated[
    bool,
    typer.Option("--allow-live", help="Tools may reach real APIs (record, live_read, live)."),
]
ProxyFile = Annotated[
    Path | None,
    typer.Option("--proxy", metavar="FILE", help="The operator's proxy.toml (secrets, quotas)."),
]
UnsafeLocal = Annotated[
    bool,
    typer.Option(
        "--unsafe-local", help="MCP servers and simulators on this machine, without a box."
    ),
]


def live(
    config: SandboxConfig, allow_live: bool, proxy_file: Path | None, folder: Path
) -> SandboxConfig:
    """``config`` with what the options allow. Calls to real APIs are audited below the task's own
    ``.parl``, which belongs to no version of the task. ConfigError for a file that is not there."""
    if proxy_file is not None and not proxy_file.is_file():
        raise ConfigError(f"--proxy {proxy_file}: no such file; expected a proxy.toml")
    changed: dict[str, object] = {"allow_live": allow_live or config.allow_live}
    if proxy_file is not None:
        changed["proxy_file"] = proxy_file
    if changed["allow_live"] and folder.is_dir() and config.proxy_dir is None:
        changed["proxy_dir"] = folder / ".parl" / "proxy"
    return config.model_copy(update=changed)
