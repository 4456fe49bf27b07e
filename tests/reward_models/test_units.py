"""Units counted from real files."""

from __future__ import annotations

from pathlib import Path

import pytest
from reportlab.pdfgen.canvas import Canvas

from infra.errors import ConfigError
from reward_models import units
from reward_models.budget import token_budget
from reward_models.config import BudgetConfig
from reward_models.units import units_of


def write_pdf(path: Path, pages: int) -> None:
    canvas = Canvas(str(path))
    for number in range(pages):
        canvas.drawString(50, 500, f"page {number}")
        canvas.showPage()
    canvas.save()


def test_pages_and_lines_add_up(tmp_path: Path) -> None:
    """Two PDFs and two programs in subfolders; text, blank lines and links do not count."""
    (tmp_path / "src" / "deep").mkdir(parents=True)
    write_pdf(tmp_path / "a.pdf", 3)
    write_pdf(tmp_path / "src" / "B.PDF", 2)
    (tmp_path / "src" / "one.py").write_text("x = 1\n\n\ny = 2\n")
    (tmp_path / "src" / "deep" / "two.rs").write_text("fn main() {}\n")
    (tmp_path / "notes.txt").write_text("many\nlines\n")
    (tmp_path / "link.py").symlink_to("/etc/passwd")
    found = units_of(tmp_path)
    assert found == {"pdf_pages": 5.0, "code_lines": 3.0}
    assert token_budget(found, BudgetConfig()) == 5 * 120 + 3 * 80
    assert units_of(tmp_path, ["code_lines"]) == {"code_lines": 3.0}
    assert units_of(tmp_path / "a.pdf") == {"pdf_pages": 3.0}


def test_a_task_without_units_has_no_budget(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "empty.py").write_text("\n\n")
    assert units_of(tmp_path) == {}
    assert token_budget({}, BudgetConfig()) is None


def test_what_cannot_be_counted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.pdf").write_text("no pdf")
    with pytest.raises(ConfigError, match=r"bad\.pdf cannot be read as PDF.*pdf_pages = 12"):
        units_of(tmp_path)
    with pytest.raises(ConfigError, match=r"no unit extractor 'pages'; expected some of code"):
        units_of(tmp_path, ["pages"])
    monkeypatch.setattr(units, "MAX_FILES", 1)
    (tmp_path / "bad.pdf").rename(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ConfigError, match="more than 1 files"):
        units_of(tmp_path)
