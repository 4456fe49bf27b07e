"""What `parl rl submit` hands to a job that runs in another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from parl.cli.submit import with_absolute_paths
from parl.config import RunConfig


def test_relative_paths_mean_the_submitters_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own folder is temporary: a ledger in it would go with it."""
    monkeypatch.chdir(tmp_path)
    given = {
        "run": {"dir": "runs", "ledger": "sqlite:///books/ledger.db"},
        "tasks": {"family": "folder:tasks/mine"},
        "sandbox": {"proxy_file": "proxy.toml"},
    }
    config = with_absolute_paths(RunConfig.model_validate(given))
    assert config.run.dir == f"{tmp_path}/runs"
    assert config.run.ledger == f"sqlite:///{tmp_path}/books/ledger.db"
    assert config.tasks.family == f"folder:{tmp_path}/tasks/mine"
    assert config.sandbox.proxy_file == f"{tmp_path}/proxy.toml"
    assert config.sandbox.proxy_socket == ""


@pytest.mark.parametrize(
    "ledger", ["", "sqlite:////var/ledger.db", "postgresql+psycopg://me:secret@host/books"]
)
def test_what_is_absolute_stays(ledger: str) -> None:
    config = RunConfig.model_validate({"run": {"ledger": ledger, "dir": "/runs"}})
    assert with_absolute_paths(config) == config
