"""Rules for verifiers that run, source or import what the agent may have written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sandbox.check.findings import Step

RULE = "verifier-executes-agent-text"
AGENT_ROOTS = ("/app", "/workspace", "/home", "/root", "/tmp", "/logs/agent", "/testbed")
_ROOTS = "|".join(re.escape(root) for root in AGENT_ROOTS)
_SOURCED = re.compile(
    rf"(?m)(?:^|[;&|({{]|\b(?:then|do|else)\b)[ \t]*(?:\.|source)[ \t]+[\"']?"
    rf"(?P<path>(?:{_ROOTS})/(?!\.local/bin/env)[^\s;\"']*|\.{{1,2}}/[^\s;\"']+|[A-Za-z_][\w./-]*)"
)
_EVALUATED = re.compile(rf"(?m)^[^#\n]*\beval\b[^\n]*(?P<path>(?:{_ROOTS})/[^\s;\"'`)]*)")
_PYTHONPATH = re.compile(rf"(?m)^[^#\n]*\b(?:PYTHONPATH|BASH_ENV|ENV)=[^\s]*?(?P<path>{_ROOTS})\b")
_RUNNERS = frozenset(
    {"runpy.run_path", "run_path", "importlib.util.spec_from_file_location",
     "spec_from_file_location", "SourceFileLoader", "importlib.machinery.SourceFileLoader",
     "exec", "eval", "execfile", "ctypes.CDLL", "CDLL", "site.addsitedir"}
)  # fmt: skip
_PATH_CALLS = frozenset({"sys.path.insert", "sys.path.append", "sys.path.extend"})
_ADVICE = (
    "what the agent wrote then runs inside the verifier and can write the reward; read the file as "
    "data, or run it as a process of its own and judge its output"
)


def lint_agent_code(folder: Path, step: Step) -> None:
    """tests/*.sh and tests/*.py, read and never run."""
    for path in sorted((folder / "tests").rglob("*.sh")):
        name = path.relative_to(folder).as_posix()
        text = path.read_text("utf-8", "replace")
        for pattern, what in ((_SOURCED, "sources"), (_EVALUATED, "evaluates"),
                              (_PYTHONPATH, "searches for code in")):  # fmt: skip
            for match in pattern.finditer(text):
                start = text.rfind("\n", 0, match.start("path")) + 1
                if "#" in text[start : match.start("path")].split("<<")[0].split('"')[0]:
                    continue
                line = text.count("\n", 0, match.start("path")) + 1
                step.add(RULE, f"{name}:{line}", f"{what} {match['path']}: {_ADVICE}")
    for path in sorted((folder / "tests").rglob("*.py")):
        try:
            tree = ast.parse(path.read_text("utf-8", "replace"))
        except (SyntaxError, ValueError, RecursionError):
            continue  # lint_verifier says so
        _python(tree, path, folder, step)


def _python(tree: ast.Module, path: Path, folder: Path, step: Step) -> None:
    name = path.relative_to(folder).as_posix()
    known = _agent_names(tree)
    own = {entry.stem for entry in (folder / "tests").rglob("*")}
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [
                node.module or ""]  # fmt: skip
            for module in modules:
                root = module.split(".")[0]
                if f"/{root}" in AGENT_ROOTS and root not in own:
                    step.add(RULE, where, f"imports {module} of the agent's folder: {_ADVICE}")
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(_is_agents(argument, known) for argument in given):
            if called in _PATH_CALLS:
                step.add(RULE, where, f"{called} with the agent's folder: {_ADVICE}")
            elif called in _RUNNERS:
                step.add(RULE, where, f"{called} of a file of the agent's: {_ADVICE}")


def _agent_names(tree: ast.Module) -> set[str]:
    """Variables that hold a path below an agent's folder."""
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for item in node.items:
                if isinstance(item.optional_vars, ast.Name) and _is_agents(
                    item.context_expr, known
                ):
                    known.add(item.optional_vars.id)
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for left, right in pairs:
                if isinstance(left, ast.Name) and _is_agents(right, known):
                    known.add(left.id)
    return known


def _is_agents(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression speaks of a path below an agent's folder, or of the working folder."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in known:
            return True
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value
            if any(text == root or text.startswith(root + "/") for root in AGENT_ROOTS):
                return True
        if isinstance(part, ast.Call) and ast.unparse(part.func) in ("os.getcwd", "Path.cwd"):
            return True
    return False
