"""Clocks beside Python's own are seen in the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sandbox.check.lint import lint_folder
from sandbox.check.lint_clock import clock_conditions
from sandbox.templates.new import write_task
from tests.sandbox.check.planting import append


@pytest.mark.parametrize(
    "code",
    [
        "db.execute(\"select date('now') > '2027-06-30'\")",
        "db.execute(\"SELECT id FROM loans WHERE due < datetime('now', '-1 day')\")",
        "db.execute('delete from loans where due < CURRENT_TIMESTAMP')",
        "sql = f\"update {t} set state = 'late' where strftime('%Y', 'now') = '2027'\"",
        "if path.stat().st_mtime > 1830000000: pass",
        "import os\nold = os.path.getmtime(p)\nassert old < limit",
        "late = time.time() - p.stat().st_mtime_ns > 5",
    ],
)
def test_a_condition_on_another_clock_is_seen(code: str) -> None:
    """In SQL and in the times of files."""
    assert list(clock_conditions(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "db.execute('insert into log values (?, CURRENT_TIMESTAMP)')",
        "db.execute('create table log (at text default CURRENT_TIMESTAMP)')",
        "db.execute(\"update loans set at = datetime('now') where id = ?\")",
        "db.execute('select date(due) from loans where due < ?')",
        '"""Loans whose day is before CURRENT_DATE, where due < CURRENT_DATE."""',
        "newer = a.stat().st_mtime > b.stat().st_mtime",
        "stamp = path.stat().st_mtime",
    ],
)
def test_what_is_no_condition_is_left_alone(code: str) -> None:
    """Stamps that are only kept, dates of the data, one file against another."""
    assert not list(clock_conditions(ast.parse(code)))


def test_it_is_a_warning_with_its_line(tmp_path: Path) -> None:
    """For the tools and for the verifier."""
    folder = write_task(tmp_path / "x", "acme/x", "python")
    for part in ("tools/tools.py", "tests/verify.py"):
        append(folder / part, "\n\ndef late(db):\n    return db.execute(\"select date('now')\")\n")
    found = lint_folder(folder).findings
    assert [each.rule for each in found] == ["nondeterministic-verifier", "luck-in-world"][::-1]
    assert all(each.severity == "warning" and "condition on the clock" in each.message
               for each in found)  # fmt: skip
