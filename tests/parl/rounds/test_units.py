"""Budget units of a task folder that says none are counted from its files."""

from __future__ import annotations

from pathlib import Path

from parl.rounds.parts import counted_units
from parl.rounds.tasks import TaskSource
from sandbox.catalog.registry import get_family
from sandbox.check.folder_family import FolderFamily
from tests.sandbox.proxied_tasks import write_task


def test_lines_of_a_folder_task(tmp_path: Path) -> None:
    """What the author said wins; a shipped family says its own."""
    folder = write_task(tmp_path / "task", "")
    (folder / "environment" / "program.py").write_text("a = 1\n\nb = 2\n")
    family = FolderFamily(folder)
    source = TaskSource(family, {"proxied": 1.0}, 1, 2, units=counted_units(family))
    assert [task.budget_units for task in source.train(0)] == [{"code_lines": 2.0}] * 2
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text + "units = {calls = 3}\n")
    family = FolderFamily(folder)
    source = TaskSource(family, {"proxied": 1.0}, 1, 1, units=counted_units(family))
    assert source.train(0)[0].budget_units == {"calls": 3.0}
    assert counted_units(get_family("lookup_calc")) is None
