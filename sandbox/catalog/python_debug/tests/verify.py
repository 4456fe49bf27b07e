"""Verifier of python_debug: calls the package's functions and compares the answers itself.

Of the end state it takes the sources of the package's own modules and nothing else: no test, no
conftest, no file with another name. They are read as data, refused if they import or name what the
package has no use for, and then run in a process of their own, which is told functions and
arguments but no right answer.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_CHARS = 64_000
TIMEOUT_S = 20.0
IMPORTS = frozenset(
    {"__future__", "bisect", "collections", "dataclasses", "datetime", "decimal", "fractions",
     "functools", "heapq", "itertools", "math", "re", "typing"}
)  # fmt: skip
FORBIDDEN = frozenset(
    {"open", "eval", "exec", "compile", "globals", "locals", "vars", "input", "breakpoint",
     "getattr", "setattr", "delattr", "memoryview"}
)  # fmt: skip
METHODS = frozenset({"copy", "queue", "select", "time", "token"})
"""Names of modules that are also names of methods, and lead nowhere."""
CHILD = """
import json, os, resource, sys
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 1)
os.dup2(null, 2)
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (96 << 20, 96 << 20))
job = json.load(sys.stdin)
sys.path.insert(0, job["folder"])
answers = []
for module, function, arguments in job["calls"]:
    try:
        loaded = __import__(job["package"] + "." + module, fromlist=["x"])
        answers.append(json.dumps(["value", getattr(loaded, function)(*arguments)], sort_keys=True))
    except Exception as error:
        answers.append(json.dumps(["raises", type(error).__name__]))
data = json.dumps(answers).encode()
while data:
    data = data[os.write(out, data):]
os._exit(0)
"""


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``{"correctness": 0.0 | 1.0, "reasons": [...]}``; the final text does not count."""
    sources: dict[str, str] = {}
    files = end_state.get("files")
    if not isinstance(files, dict):
        return _wrong("the end state holds no files")
    for module in data["modules"]:
        name = f"{data['package']}/{module}.py"
        text = files.get(name)
        if not isinstance(text, str) or len(text) > MAX_CHARS:
            return _wrong(f"{name} is missing or too long")
        problem = _problem(text, data["package"])
        if problem is not None:
            return _wrong(f"{name} {problem}")
        sources[module] = text
    answers = _answers(sources, data)
    if answers is None:
        return _wrong("the package does not end well: too slow, out of memory or killed")
    expected = [json.dumps(answer, sort_keys=True) for _, _, _, answer in data["calls"]]
    num_wrong = sum(given != right for given, right in zip(answers, expected, strict=True))
    if num_wrong:
        return _wrong(f"{num_wrong} of {len(expected)} hidden calls answer wrongly")
    return {"correctness": 1.0, "reasons": [f"all {len(expected)} hidden calls"]}


def _wrong(reason: str) -> dict[str, Any]:
    return {"correctness": 0.0, "reasons": [reason]}


def _problem(text: str, package: str) -> str | None:
    """Why a source may not run here."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not valid Python"
    for node in ast.walk(tree):
        for name in _imported(node, package):
            if name not in IMPORTS | {package}:
                return f"imports {name[:40]}, for which the package has no use"
        for name, inner in _used(node):
            if _leads_out(name, inner):
                return f"uses {name[:40]}, for which the package has no use"
    return None


def _imported(node: ast.AST, package: str) -> list[str]:
    """Top-level modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or package).split(".")[0] if node.level == 0 else package]
    return []


def _used(node: ast.AST) -> list[tuple[str, bool]]:
    """Names a node reads, with True where they are looked up inside something else."""
    if isinstance(node, ast.Attribute):
        return [(node.attr, True)]
    if isinstance(node, ast.Name):
        return [(node.id, False)]
    if isinstance(node, ast.ImportFrom):
        return [(alias.name, True) for alias in node.names]
    return []


def _leads_out(name: str, inner: bool) -> bool:
    """Builtins that reach the machine, dunders, and modules inside modules (dataclasses.sys)."""
    module = name.lstrip("_")
    hidden = module in sys.stdlib_module_names and module not in IMPORTS | METHODS
    if inner:
        return hidden or name.startswith("__") or name in ("modules", "*")
    return name in FORBIDDEN or name.startswith("__")


def _answers(sources: dict[str, str], data: dict[str, Any]) -> list[str] | None:
    """What the package answers to every call, as JSON texts; None when it does not end well."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        package = Path(folder) / data["package"]
        package.mkdir()
        (package / "__init__.py").write_text("", encoding="utf-8")
        for module, text in sources.items():
            (package / f"{module}.py").write_text(text, encoding="utf-8")
        job = {
            "folder": folder,
            "package": data["package"],
            "calls": [call[:3] for call in data["calls"]],
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-c", CHILD],
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return None
    return _read(done.stdout, len(data["calls"]))


def _read(output: bytes, count: int) -> list[str] | None:
    """The child's answers; it ran foreign code, so nothing about them is taken for granted."""
    try:
        answers = json.loads(output)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answers, list) or len(answers) != count:
        return None
    return [answer if isinstance(answer, str) else "" for answer in answers]
