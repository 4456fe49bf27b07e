"""Bugs as line edits: operators that change one place of a correct module.

``python -m sandbox.catalog.python_debug.mutations`` tries every edit in a process of its own and
writes those that some shown test notices (and that end) to mutants.json.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandbox.catalog.python_debug.cases import CASES

HERE = Path(__file__).parent
MUTANTS_FILE = HERE / "mutants.json"
TIMEOUT_S = 5.0
COMPARE: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}  # fmt: skip
ARITHMETIC: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "sorted": "list", "all": "any", "abs": "int"}
RUNNER = """
import json, sys
job = json.load(sys.stdin)
module = {}
exec(compile(job["source"], "module", "exec"), module)
answers = []
for function, arguments in job["calls"]:
    try:
        answers.append(["value", module[function](*arguments)])
    except Exception as error:
        answers.append(["raises", type(error).__name__])
print(json.dumps(answers))
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` and ``new`` are line ``line`` (1-based) of the correct and of the broken module."""

    module: str
    line: int
    old: str
    new: str

    @property
    def identity(self) -> str:
        return f"{self.module}:{self.line}:{self.new.strip()}"


def source_of(module: str) -> str:
    """Text of a correct module."""
    return (HERE / "modules" / f"{module}.py").read_text(encoding="utf-8")


def broken(source: str, mutant: Mutant) -> str:
    """The module with the bug."""
    lines = source.splitlines(keepends=True)
    assert lines[mutant.line - 1] == mutant.old + "\n", f"{mutant.identity}: module has changed"
    lines[mutant.line - 1] = mutant.new + "\n"
    return "".join(lines)


def answers(source: str, calls: list[Any], timeout_s: float = TIMEOUT_S) -> list[Any] | None:
    """What the calls answer, in a process of its own; None when it does not end well."""
    command = [sys.executable, "-I", "-S", "-B", "-c", RUNNER]
    job = json.dumps({"source": source, "calls": calls})
    try:
        done = subprocess.run(
            command, input=job, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def load_mutants() -> tuple[Mutant, ...]:
    """The bugs that shown tests notice."""
    return tuple(Mutant(**entry) for entry in json.loads(MUTANTS_FILE.read_text(encoding="utf-8")))


def candidates(module: str) -> Iterator[Mutant]:
    """Every edit, in the order of the text; each leaves a line that is unique in the module."""
    source = source_of(module)
    lines = source.splitlines()
    seen = set()
    for node in ast.walk(ast.parse(source)):
        for line, start, end, text in _edits(node, lines):
            old = lines[line - 1]
            new = old[:start] + text + old[end:]
            mutant = Mutant(module, line, old, new)
            if new != old and mutant not in seen and new not in lines and lines.count(old) == 1:
                seen.add(mutant)
                yield mutant


def _edits(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """(line, first column, last column, new text); the sources are ASCII, so columns are bytes."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=rights):
            for before, operator, after in zip([left, *rights], ops, rights, strict=False):
                yield from _between(before, after, COMPARE.get(type(operator)), lines)
        case ast.BinOp(left=left, op=operator, right=right):
            yield from _between(left, right, ARITHMETIC.get(type(operator)), lines)
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            pair = (" and ", " or ") if isinstance(operator, ast.And) else (" or ", " and ")
            yield from _between(left, right, pair, lines)
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as operator, value=value):
            pair = ("+=", "-=") if isinstance(operator, ast.Add) else ("-=", "+=")
            yield from _between(target, value, pair, lines)
        case ast.UnaryOp(op=ast.Not(), operand=operand) if node.lineno == operand.lineno:
            yield node.lineno, node.col_offset, operand.col_offset, ""
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and number < 100:
            for other in {number + 1, max(0, number - 1)} - {number}:
                yield node.lineno, node.col_offset, node.end_col_offset or 0, str(other)
        case ast.Name(id=name) if name in NAMES:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, NAMES[name]


def _between(
    left: ast.expr, right: ast.expr, pair: tuple[str, str] | None, lines: list[str]
) -> Iterator[tuple[int, int, int, str]]:
    """The operator between two operands of one line."""
    if pair is None or left.end_lineno != right.lineno:
        return
    gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    offset = gap.find(pair[0])
    if offset >= 0:
        start = (left.end_col_offset or 0) + offset
        yield right.lineno, start, start + len(pair[0]), pair[1]


def noticed(module: str) -> Iterator[Mutant]:
    """The candidates that end and that a shown test notices."""
    source = source_of(module)
    calls = [list(case) for case in CASES[module]]
    right = answers(source, calls)
    assert right is not None, f"{module}: the correct module fails"
    for mutant in candidates(module):
        wrong = answers(broken(source, mutant), calls)
        if wrong is not None and wrong[::2] != right[::2]:
            yield mutant


def main() -> int:
    """Write mutants.json."""
    found = [asdict(mutant) for module in sorted(CASES) for mutant in noticed(module)]
    text = "[\n" + ",\n".join(json.dumps(entry) for entry in found) + "\n]\n"
    MUTANTS_FILE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(found)} mutants of {len(CASES)} modules\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
