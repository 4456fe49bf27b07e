"""One undisturbed run, made once, and what was on disk after each of its rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parl.rounds.world import Run, copy_run, facts


@dataclass(frozen=True)
class Calm:
    """``folders[n]``: the run's folder after n rounds; 0 = after the warm start."""

    folders: list[Path]
    facts: dict[str, Any]


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    root = tmp_path_factory.mktemp("calm")
    folders: list[Path] = []
    (root / "run").mkdir()
    with Run.open(root / "run") as run:
        run.warm_start()
        folders.append(copy_run(run, root / "after-0"))
        while not run.machine.finished:
            report = run.machine.step()
            folders.append(copy_run(run, root / f"after-{report.index + 1}"))
        audit = run.store.audit()
        assert audit.ok, audit
        return Calm(folders, facts(run))


@pytest.fixture
def resume_from(calm: Calm, tmp_path: Path) -> Callable[[int], Path]:
    """(rounds done) -> a folder of its own with the run as it then was."""

    def copy(num_rounds: int) -> Path:
        return copy_run(calm.folders[num_rounds], tmp_path / "run")

    return copy
