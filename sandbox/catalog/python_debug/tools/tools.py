"""Tools of python_debug: read and change a small package, run its tests. Run in the box."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sandbox.toolkit import ToolError, tool, workdir

MAX_FILE_CHARS = 64_000
MAX_FILES = 40
MAX_REPORT_CHARS = 6_000
TESTS_TIMEOUT_S = 12.0
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}(/[a-z_][a-z0-9_]{0,40}){0,2}\.py")
RUN_TESTS = """
import sys, unittest
sys.path.insert(0, sys.argv[1])
suite = unittest.defaultTestLoader.discover(sys.argv[1] + "/tests", top_level_dir=sys.argv[1])
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=0).run(suite)
sys.exit(not result.wasSuccessful())
"""


def setup(data: dict[str, Any]) -> None:
    """Write the package: ``data["files"]`` is {path: text}."""
    for name, text in data["files"].items():
        path = workdir() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@tool(effect="read", idempotent=True)
def list_files() -> str:
    """Files of the package and its tests, with their number of lines."""
    lines = []
    for name in _names():
        text = (workdir() / name).read_text(encoding="utf-8", errors="replace")
        lines.append(f"{name}: {len(text.splitlines())} lines")
    return "\n".join(lines)


@tool(effect="read", idempotent=True)
def read_file(path: str) -> str:
    """Text of a file."""
    return _existing(path).read_text(encoding="utf-8", errors="replace")


@tool(effect="write", idempotent=True)
def write_file(path: str, text: str) -> str:
    """Write a whole file; it is replaced if it exists."""
    if len(text) > MAX_FILE_CHARS:
        raise ToolError(f"at most {MAX_FILE_CHARS} characters a file")
    target = _inside(path)
    if not target.exists() and len(_names()) >= MAX_FILES:
        raise ToolError(f"at most {MAX_FILES} files")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return f"{path}: {len(text.splitlines())} lines"


@tool(effect="write")
def replace_text(path: str, old: str, new: str) -> str:
    """Replace a text that occurs exactly once in a file."""
    target = _existing(path)
    text = target.read_text(encoding="utf-8", errors="replace")
    count = text.count(old) if old else 0
    if count != 1:
        raise ToolError(f"the old text occurs {count} times in {path}; it must occur once")
    return write_file(path, text.replace(old, new))


@tool(effect="read")
def run_tests() -> str:
    """Run the tests and show what fails."""
    command = [sys.executable, "-I", "-S", "-B", "-c", RUN_TESTS, str(workdir())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TESTS_TIMEOUT_S,
            check=False,
            cwd=workdir(),
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"the tests did not end within {TESTS_TIMEOUT_S:g} s") from error
    report = done.stdout.decode("utf-8", "replace").replace(f"{workdir()}/", "")
    report = re.sub(r"(Ran \d+ tests?) in [0-9.]+s", r"\1", report).strip()
    if len(report) > MAX_REPORT_CHARS:
        half = MAX_REPORT_CHARS // 2
        report = f"{report[:half]}\n...\n{report[-half:]}"
    return report or f"the tests ended with status {done.returncode} and no output"


def _names() -> list[str]:
    """Relative paths of the Python files, sorted; links are not followed."""
    root = workdir()
    paths = (path for path in root.rglob("*.py") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(root)) for path in paths)


def _inside(path: str) -> Path:
    if not NAME.fullmatch(path):
        raise ToolError(
            f"path {path!r}: expected a Python file such as {(_names() or ['a.py'])[0]}"
        )
    target = workdir() / path
    if target.is_symlink() or target.parent.is_symlink() or target.is_dir():
        raise ToolError(f"{path} is no plain file")
    return target


def _existing(path: str) -> Path:
    target = _inside(path)
    if not target.is_file():
        raise ToolError(f"no file {path}; list_files shows them")
    return target


def end_state() -> dict[str, Any]:
    """The sources, as text; what is too large is left out."""
    files = {}
    for name in _names()[:MAX_FILES]:
        path = workdir() / name
        if path.stat().st_size <= 4 * MAX_FILE_CHARS:
            files[name] = path.read_text(encoding="utf-8", errors="replace")
    return {"files": files}
