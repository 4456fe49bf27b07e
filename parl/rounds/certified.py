"""Folder tasks of a run must be certified: refused before anything exists, then recorded."""

from __future__ import annotations

from pathlib import Path

from infra.db.engine import Ledger
from parl.config import RunConfig
from parl.store.tasks import TaskRegistry
from sandbox.check.certificate import Certificate, require_certificate
from sandbox.check.folder_family import PREFIX, task_folders
from sandbox.task import load_task


def require_certified(config: RunConfig) -> list[tuple[Path, Certificate]]:
    """Folders and certificates of ``tasks.family = "folder:PATH"``; none for a shipped family.

    TaskError for the first folder without a valid certificate, unless tasks.allow_uncertified.
    """
    if not config.tasks.family.startswith(PREFIX) or config.tasks.allow_uncertified:
        return []
    folders = task_folders(Path(config.tasks.family.removeprefix(PREFIX)))
    return [(folder, require_certificate(folder)) for folder in folders]


def record_certificates(ledger: Ledger, certified: list[tuple[Path, Certificate]]) -> None:
    """The run's ledger then tells what vouched for its tasks."""
    registry = TaskRegistry(ledger)
    for folder, certificate in certified:
        registry.add_certificate(certificate, None, load_task(folder).spec)
