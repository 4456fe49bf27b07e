"""Size report: lines per package, long files, long functions. Exits 1 above the hard caps.

Run from anywhere: ``python scripts/size.py``. Needs nothing but Python 3.11. A line is a line of
the file, comments and blanks included, because that is what a reader scrolls through.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("parl", "sandbox", "reward_models", "engine", "infra", "tests", "scripts")
FILE_LINES, FILE_CAP = 300, 500
FUNCTION_LINES, FUNCTION_CAP = 60, 100


@dataclass(frozen=True, slots=True)
class Long:
    """A file or function above its target; ``cap`` is where the report fails."""

    where: str
    num_lines: int
    cap: int

    @property
    def too_long(self) -> bool:
        return self.num_lines > self.cap


def sources(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def long_functions(path: Path, tree: ast.Module, root: Path) -> Iterator[Long]:
    """Functions above FUNCTION_LINES, decorators not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > FUNCTION_LINES:
                where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
                yield Long(where, num_lines, FUNCTION_CAP)


def report(root: Path) -> tuple[list[str], bool]:
    """Printed lines, and whether all is below the caps."""
    lines = [f"{'package':<14} {'files':>6} {'lines':>8}"]
    long: list[Long] = []
    for package in PACKAGES:
        num_files = num_lines = 0
        for path in sources(root, package):
            text = path.read_text(encoding="utf-8")
            length = len(text.splitlines())
            num_files, num_lines = num_files + 1, num_lines + length
            if length > FILE_LINES:
                long.append(Long(str(path.relative_to(root)), length, FILE_CAP))
            long += long_functions(path, ast.parse(text), root)
        lines.append(f"{package:<14} {num_files:>6} {num_lines:>8}")
    for item in sorted(long, key=lambda item: -item.num_lines):
        verdict = f"ABOVE THE CAP OF {item.cap}" if item.too_long else f"cap {item.cap}"
        lines.append(f"{item.num_lines:>5} lines  {item.where}  ({verdict})")
    return lines, not any(item.too_long for item in long)


def main() -> int:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    lines, good = report(root)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
