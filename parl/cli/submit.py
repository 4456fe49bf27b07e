"""``parl rl submit``: `parl rl run` as a Ray job."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.cluster.jobs import DEFAULT_ADDRESS, submit
from infra.config import dump_toml
from infra.db.engine import absolute_url
from parl.cli.runs import resolve
from parl.config import RunConfig
from sandbox.check.folder_family import PREFIX

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def submit_run(
    files: Sequence[Path], overrides: Sequence[str], *, address: str, token: str, python: str
) -> int:
    """Submit, follow the log, return the exit code (the cause of a failure is on stderr).

    The configuration is resolved here, so a mistake in it costs no job; ConfigError then. Relative
    paths in it mean this machine's current folder, for the job's own folder is temporary.
    """
    config = resolve(files, overrides)
    config = with_absolute_paths(config)
    with tempfile.TemporaryDirectory(prefix="parl-job-") as folder:
        (Path(folder) / "config.toml").write_text(dump_toml(config), encoding="utf-8")
        return submit(
            [python or _python(address), "-m", "parl.cli.main", "rl", "run", "-c", "config.toml"],
            working_dir=Path(folder),
            address=address,
            auth_token_path=token,
        )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The run's folder and SQLite ledger, a task folder and the proxy's file, seen from here."""
    run = {"dir": str(Path(config.run.dir).absolute()), "ledger": absolute_url(config.run.ledger)}
    changes: dict[str, Any] = {"run": config.run.model_copy(update=run)}
    family = config.tasks.family
    if family.startswith(PREFIX):
        path = Path(family.removeprefix(PREFIX)).absolute()
        changes["tasks"] = config.tasks.model_copy(update={"family": f"{PREFIX}{path}"})
    sandbox = {
        name: str(Path(value).absolute())
        for name in ("proxy_file", "proxy_socket")
        if (value := getattr(config.sandbox, name))
    }
    changes["sandbox"] = config.sandbox.model_copy(update=sandbox)
    return config.model_copy(update=changes)


def _python(address: str) -> str:
    """This interpreter when the cluster is this machine, else whatever the image calls python."""
    host = urlsplit(address or DEFAULT_ADDRESS).hostname
    return sys.executable if host in LOCAL_HOSTS else "python"
