"""Clocks beside Python's own: the day in SQL, and the times that files carry.

The step "clock" moves Python's clock only, so a condition on these is met on no other day that is
tried; it can be read in the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sandbox.check.findings import Step

_NOW = (
    r"(?:\b(?:date|time|datetime|julianday|unixepoch|strftime)\s*\([^()]*'now'[^()]*\)"
    r"|\b(?:unixepoch|now|getdate|sysdate)\s*\(\s*\)|\bCURRENT_(?:TIMESTAMP|DATE|TIME)\b)"
)
_SQL = re.compile(
    rf"(?is)^\s*(?:with\b.*?)?select\b.*?{_NOW}"
    rf"|\b(?:where|and|or|on|when|having|check|between)\b[^;]*?{_NOW}"
    rf"|{_NOW}\s*(?:[<>=!]|between\b|in\b)|[<>]=?\s*{_NOW}"
)
_FILE_TIMES = frozenset(
    f"st_{kind}{unit}" for kind in ("mtime", "ctime", "atime", "birthtime") for unit in ("", "_ns")
)
_GETTERS = frozenset({"getmtime", "getctime", "getatime"})
_ADVICE = "a condition on the clock, which no other day was tried for; put the date into the data"


def lint_clock(folder: Path, step: Step) -> None:
    """Warnings for tools/, environment/ and tests/."""
    for part in ("tools", "environment", "tests"):
        rule = "nondeterministic-verifier" if part == "tests" else "luck-in-world"
        for path in sorted((folder / part).rglob("*.py")):
            try:
                tree = ast.parse(path.read_text("utf-8", "replace"))
            except (SyntaxError, ValueError, RecursionError):
                continue  # told elsewhere; other files may be for another Python
            name = path.relative_to(folder).as_posix()
            for line, what in sorted(set(clock_conditions(tree))):
                step.add(rule, f"{name}:{line}", f"{what!r} is {_ADVICE}", "warning")


def clock_conditions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of every SQL text that asks for the day, and every comparison of a file's time
    with anything but another file's time."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    held = _held(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings:
            found = _SQL.search(_text(node))
            if found is not None:
                yield node.lineno, " ".join(found[0].split())[-80:]
        if isinstance(node, ast.Compare):
            timed = [_has_file_time(side, held) for side in (node.left, *node.comparators)]
            if any(timed) and not all(timed):
                yield node.lineno, ast.unparse(node)[:80]


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    words = (part.value if isinstance(part, ast.Constant) else "?" for part in parts)
    return "".join(word for word in words if isinstance(word, str))


def _held(tree: ast.Module) -> set[str]:
    """Variables that hold a file's time."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _has_file_time(node.value, set()):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.NamedExpr) and _has_file_time(node.value, set()):
            found.add(node.target.id)
    return found


def _has_file_time(node: ast.AST, held: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Attribute) and part.attr in _FILE_TIMES | _GETTERS)
        or (isinstance(part, ast.Name) and (part.id in held or part.id in _GETTERS))
        for part in ast.walk(node)
    )
