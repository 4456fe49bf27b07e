"""Rules for worlds that go by luck or by the clock: tools.py and the services it starts, unrun.

A failure of one call in a thousand is met by no affordable number of episodes, but the condition
that makes it can be read.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sandbox.check.findings import Step

_CLOCKS = frozenset(
    {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
     "time.localtime", "time.gmtime", "time.ctime"}
)  # fmt: skip
_DRAWS = frozenset(
    {f"random.{name}" for name in ("random", "randint", "choice", "choices", "sample", "uniform",
                                   "randrange", "gauss", "getrandbits")}
    | {"os.urandom", "uuid.uuid4", "uuid.uuid1", "secrets.randbelow", "secrets.choice",
       "secrets.token_hex", "secrets.token_bytes", "random.SystemRandom", "secrets.SystemRandom"}
)  # fmt: skip
_PHASES = frozenset(
    {"hour", "minute", "second", "microsecond", "weekday", "isoweekday", "isocalendar", "day",
     "month", "year", "tm_hour", "tm_min", "tm_sec", "tm_wday", "tm_mday", "tm_mon", "tm_year",
     "tm_yday", "strftime", "isoformat", "time"}
)  # fmt: skip
_PARTS = ("tools", "environment")
_SHELL = re.compile(
    r"(?m)^[^#\n]*\b(?:if|while|\[\[?|\(\()[^#\n]*(\$\{?RANDOM\b|\bshuf\b|/dev/u?random"
    r"|\$\(\s*date\b|`\s*date\b|\$\{?EPOCH\w*)"
)
_ADVICE = "the same calls must always answer alike; draw from the data's seed and keep dates in it"


def lint_luck(folder: Path, step: Step) -> None:
    """Conditions on an unseeded draw, or on the day or the phase of the clock."""
    for part in _PARTS:
        for path in sorted((folder / part).rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            try:
                tree = ast.parse(path.read_text("utf-8", "replace"))
            except (SyntaxError, ValueError, RecursionError):
                continue  # tools.py: "invalid-task"; other files may be for another Python
            _python(tree, name, step)
        for path in sorted((folder / part).rglob("*.sh")):
            text = path.read_text("utf-8", "replace")
            for match in _SHELL.finditer(text):
                line = text.count("\n", 0, match.start(1)) + 1
                where = f"{path.relative_to(folder).as_posix()}:{line}"
                step.add("luck-in-world", where, f"asks {match[1]}: {_ADVICE}")


def _python(tree: ast.Module, name: str, step: Step) -> None:
    long_names = _imported(tree)
    seeded = any(
        isinstance(node, ast.Call) and _called(node, long_names) == "random.seed" and node.args
        for node in ast.walk(tree)
    )
    clocks, draws = _named(tree, long_names, _CLOCKS), _named(tree, long_names, _DRAWS)
    for test in _tests(tree):
        drawn = next((part for part in ast.walk(test)
                      if _is_source(part, long_names, _DRAWS, draws)), None)  # fmt: skip
        if drawn is not None and not seeded:
            step.add(
                "luck-in-world",
                f"{name}:{test.lineno}",
                f"{ast.unparse(test)[:80]!r} is decided by an unseeded draw: {_ADVICE}",
            )
        if any(_by_phase(part, long_names, clocks) for part in ast.walk(test)):
            step.add(
                "luck-in-world",
                f"{name}:{test.lineno}",
                f"{ast.unparse(test)[:80]!r} is decided by the day or the clock: {_ADVICE}",
            )


def _tests(tree: ast.Module) -> list[ast.expr]:
    """Conditions: of statements, expressions and comprehensions, and comparisons elsewhere."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            found.append(node.test)
        elif isinstance(node, ast.comprehension):
            found += node.ifs
        elif isinstance(node, ast.Match):
            found.append(node.subject)
        elif isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.Compare):
            found.append(node.value)
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, for what is imported under another."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = alias.name.split(".")[0]
                if alias.asname:
                    found[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _called(call: ast.Call, long_names: dict[str, str]) -> str:
    words = ast.unparse(call.func).split(".")
    words[0] = long_names.get(words[0], words[0])
    dotted = ".".join(words)
    return dotted.removeprefix("datetime.") if dotted.startswith("datetime.date") else dotted


def _is_source(
    node: ast.AST, long_names: dict[str, str], sources: frozenset[str], names: set[str]
) -> bool:
    if isinstance(node, ast.Call):
        return _called(node, long_names) in sources
    return isinstance(node, ast.Name) and node.id in names


def _named(tree: ast.Module, long_names: dict[str, str], sources: frozenset[str]) -> set[str]:
    """Variables that hold what a source gave, or something made of it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is_source(part, long_names, sources, set()) for part in ast.walk(node.value)):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _by_phase(node: ast.AST, long_names: dict[str, str], clocks: set[str]) -> bool:
    """A clock that is taken apart or compared with a fixed moment. A deadline (a clock against
    another, or against a variable) is none."""

    def has_clock(part: ast.AST) -> bool:
        return any(_is_source(inner, long_names, _CLOCKS, clocks) for inner in ast.walk(part))

    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return has_clock(node.left)
    if isinstance(node, ast.Attribute) and node.attr in _PHASES:
        return has_clock(node.value)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        bare = [side for side in sides if _is_source(side, long_names, _CLOCKS, clocks)]
        return bool(bare) and any(_is_fixed(side, long_names) for side in sides)
    return False


def _is_fixed(node: ast.AST, long_names: dict[str, str]) -> bool:
    """A number or date written in the source."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and node.value != 0
    if isinstance(node, ast.Call) and node.args:
        made = _called(node, long_names) in (
            "datetime",
            "date",
            "datetime.datetime",
            "datetime.fromisoformat",
            "date.fromisoformat",
        )
        return made and all(isinstance(argument, ast.Constant) for argument in node.args)
    return False
