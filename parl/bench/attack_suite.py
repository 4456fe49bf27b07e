"""The attacks of docs/security.md, run: which rows hold at which level."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from parl.bench.command import ROOT
from parl.bench.records import Item

FILES = {
    "a": "test_attacks.py",
    "k": "test_attacks_kernel.py",
    "v": "test_attacks_verifier.py",
    "b": "test_boxes.py",
    "e": "test_extract.py",
    "p": "test_pool.py",
    "d": "docker/test_docker.py",
}
LEVELS = ("docker", "A", "B", "C")
TIMEOUT_S = 2400.0
_ROW = re.compile(r"^\| (.+?) \| ([akvbepd]) `(test_\w+)` \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; ``levels``: those that it claims."""

    attack: str
    key: str
    test: str
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One test case that ran; ``level`` None = its test has no such parameter. ``problem``: why it
    did not pass."""

    test: str
    level: str | None
    problem: str | None


def read_rows(text: str) -> list[Row]:
    """The rows of docs/security.md."""
    return [
        Row(
            attack,
            key,
            test,
            tuple(
                level
                for level, cell in zip(LEVELS, cells.split(" | "), strict=True)
                if cell == "pass"
            ),
        )
        for attack, key, test, cells in _ROW.findall(text)
    ]


def read_cases(report: Path) -> Iterator[Case]:
    """Cases of a junit file that pytest wrote."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test, _, parameters = case.attrib["name"].partition("[")
        level = next((p for p in parameters.rstrip("]").split("-") if p in LEVELS), None)
        problem = None
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                problem = f"{child.tag}: {child.attrib.get('message', '')}".splitlines()[0][:200]
        yield Case(test, level, problem)


def judged(rows: list[Row], cases: list[Case]) -> dict[str, Any]:
    """Rows that hold, by level. One holds when a case of its level ran and none had a problem: a
    skipped one does not hold, its reason is listed."""
    held, claimed = Counter[str](), Counter[str]()
    problems = []
    for row in rows:
        for level in row.levels:
            mine = [c for c in cases if c.test == row.test and c.level in (level, None)]
            found = {case.problem for case in mine if case.problem}
            claimed[level] += 1
            held[level] += bool(mine) and not found
            if not mine:
                found = {"did not run"}
            problems += [f"{row.attack}, {level}: {problem}" for problem in sorted(found)]
    return {
        "ok": not problems,
        "rows": len(rows),
        "held": {level: f"{held[level]} of {claimed[level]}" for level in LEVELS if claimed[level]},
        "problems": problems,
    }


def items(folder: Path) -> list[Item]:
    """One item a file of tests."""
    rows = read_rows((ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    return [
        Item(f"attacks-{key}", _Suite(folder, key, [row for row in rows if row.key == key]))
        for key in FILES
    ]


class _Suite:
    """The rows of one file; called = measured."""

    def __init__(self, folder: Path, key: str, rows: list[Row]) -> None:
        self._folder = folder
        self._key = key
        self._rows = rows

    def __call__(self) -> dict[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        report = self._folder / f"attacks-{self._key}.xml"
        report.unlink(missing_ok=True)
        file = f"tests/sandbox/{FILES[self._key]}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "--timeout=600"]
        command += [f"{file}::{row.test}" for row in self._rows]
        with (self._folder / f"attacks-{self._key}.log").open("w") as log:
            done = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False
            )
        if not report.exists():
            return {"ok": False, "exit_code": done.returncode, "problems": ["no report"]}
        return judged(self._rows, list(read_cases(report)))
