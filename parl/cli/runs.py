"""Run folders: find one by id or path, read its configuration, open its ledger."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import ConfigError

if TYPE_CHECKING:
    from infra.db.engine import Ledger
    from parl.config import RunConfig

CONFIG_FILE = "config.toml"
LEDGER_FILE = "ledger.db"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run that was started. ``run_id`` is the folder's name."""

    path: Path
    config: RunConfig

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def ledger_url(self) -> str:
        return self.config.run.ledger or f"sqlite:///{self.path / LEDGER_FILE}"

    def open_ledger(self) -> Ledger:
        """The existing ledger; LedgerError when it is gone."""
        from infra.db.engine import open_ledger

        return open_ledger(self.ledger_url, create=False, durable=self.config.run.durable)


def find_run(reference: str | None, parent: Path) -> RunFolder:
    """The run of an id below ``parent``, of a path, or (None) the one started last.

    ConfigError (exit 2) names the known and the nearest run.
    """
    from infra.config import load_config
    from parl.config import RunConfig

    path = _locate(reference, parent)
    return RunFolder(path.resolve(), load_config(RunConfig, [path / CONFIG_FILE]))


def list_runs(parent: Path) -> list[Path]:
    """Run folders below ``parent``, the oldest first."""
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if (path / CONFIG_FILE).is_file()]
    return sorted(found, key=lambda path: (path / CONFIG_FILE).stat().st_mtime)


def _locate(reference: str | None, parent: Path) -> Path:
    runs = list_runs(parent)
    if reference is None:
        if not runs:
            raise ConfigError(
                f"no run in {parent}/; start one with `parl rl run --config configs/demo.toml`, "
                "or say where runs are with --dir"
            )
        return runs[-1]
    for candidate in (parent / reference, Path(reference)):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    names = [path.name for path in runs]
    near = difflib.get_close_matches(Path(reference).name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no run {reference!r} in {parent}/ (a run folder holds {CONFIG_FILE}); "
        f"known: {', '.join(names) or 'none'}{hint}"
    )
