"""Every planted flaw is found, by its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.check.lint import lint_folder
from sandbox.check.run import CheckSettings, check_folder
from sandbox.templates.new import FAMILIES, write_task
from tests.sandbox.check.planted import FLAWS, Flaw, plant
from tests.sandbox.conftest import best_level


def names(flaws: list[Flaw]) -> list:
    return [pytest.param(flaw, id=flaw.name.replace(" ", "-")) for flaw in flaws]


@pytest.mark.parametrize("flaw", names([flaw for flaw in FLAWS if flaw.static]))
def test_a_flaw_that_can_be_seen_is_found_without_running_anything(flaw: Flaw, tmp_path: Path):
    """The rule fires on the flawed folder."""
    step = lint_folder(plant(flaw, tmp_path))
    assert flaw.rule in {found.rule for found in step.findings if found.severity == "error"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_examples_have_no_such_flaw(family: str, tmp_path: Path):
    """So each rule above fires because of what was planted."""
    step = lint_folder(write_task(tmp_path / "x", "acme/x", family))
    assert step.findings == []


STATIC = [flaw for flaw in FLAWS if flaw.static]
WHOLE = [flaw for flaw in FLAWS if not flaw.static]
# lint is a step of the check, so one flaw of each family shows for the static ones that it counts
FAMILIES_SEEN = sorted({flaw.family for flaw in STATIC})
WHOLE += [next(flaw for flaw in STATIC if flaw.family == name) for name in FAMILIES_SEEN]


@pytest.mark.slow
@pytest.mark.parametrize("flaw", names(WHOLE))
def test_the_whole_check_fails_and_names_the_flaw(flaw: Flaw, tmp_path: Path):
    """Static or not: one command finds it, and there is no certificate for the task."""
    best_level()
    report = asyncio.run(check_folder(plant(flaw, tmp_path), CheckSettings(repeat=3)))
    assert flaw.rule in report.rules, report.to_dict()
    assert not report.passed


QUICK = ("verifier readable in the box", "no solution", "two tools of one name",
         "alias of another tool", "a pipe in the folder")  # fmt: skip


@pytest.mark.parametrize("flaw", names([flaw for flaw in FLAWS if flaw.name in QUICK]))
def test_some_flaws_need_a_box(flaw: Flaw, tmp_path: Path):
    """What only running or loading shows; the others of the kind are among the slow tests."""
    best_level()
    report = asyncio.run(check_folder(plant(flaw, tmp_path), CheckSettings(repeat=2)))
    assert flaw.rule in report.rules, report.to_dict()
