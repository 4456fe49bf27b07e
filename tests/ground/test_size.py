"""scripts/size.py: counts, and the exit code at the caps."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "size.py"


def size(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def function(num_lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("x = 1\n" * 300, 0, ""),
        ("x = 1\n" * 301, 0, "301 lines  engine/a.py  (cap 500)"),
        ("x = 1\n" * 500, 0, "500 lines  engine/a.py  (cap 500)"),
        ("x = 1\n" * 501, 1, "501 lines  engine/a.py  (ABOVE THE CAP OF 500)"),
        (function(60), 0, ""),
        (function(100), 0, "100 lines  engine/a.py:1 f  (cap 100)"),
        (function(101), 1, "101 lines  engine/a.py:1 f  (ABOVE THE CAP OF 100)"),
    ],
)
def test_caps(tmp_path, text, code, said):
    """Above a target is reported, above a cap fails."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text(text)
    result = size(tmp_path)
    assert result.returncode == code
    assert said in result.stdout
    assert ("lines  engine" in result.stdout) == bool(said)


def test_this_tree_is_below_the_caps():
    """The real packages obey."""
    result = size(SCRIPT.parents[1])
    assert result.returncode == 0, result.stdout
