"""Rules over tools.py, verify.py and test.sh, read and never run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sandbox.check.findings import Step

_NETWORK_MODULES = frozenset(
    {"urllib", "requests", "httpx", "aiohttp", "socket", "http", "ftplib", "smtplib", "websockets"}
)
_CLOCK = frozenset({"time.time", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"})
_LOADERS = frozenset({"eval", "exec", "compile", "__import__"})
_UNPICKLE = frozenset(
    {"pickle.loads", "pickle.load", "marshal.loads", "shelve.open", "yaml.load", "dill.loads"}
)
_ANSWER_NAME = re.compile(r"(?i)^_?(expected|correct|right|true|gold(en)?|final)?_?"
                          r"(answer|solution|expected|oracle|ground_?truth)s?(_\w+)?$")  # fmt: skip
_REWARD_NAME = re.compile(
    r"(?i)^(is_?|all_?|num_?|tests?_?)*(reward|score|passed|pass|success|correct(ness)?|verdict|grade"
    r"|result_ok|return_?code|exit_?(code|status)"
    r"|verified)$"
)
_SHELL_NETWORK = re.compile(
    r"(?m)^[^#\n]*\b(curl|wget|pip3?\s+install|uv\s+(pip|add|sync|tool)|uvx|npx|apt-get|apk\s+add"
    r"|npm\s+(i|install|ci)|git\s+(clone|fetch|pull)|nc\s|ssh\s|huggingface-cli)\b"
)
_SHELL_TESTS = re.compile(
    r"(?m)^[^#\n]*?(?<![\w/.}-])(?P<path>/(?!tests/|usr/|bin/)[\w./-]*(test|verify|check|grade)[\w-]*\.(py|sh))"
)
_SHELL_LUCK = re.compile(
    r"(?m)^[^#\n]*(\bRANDOM\b|\bshuf\b|/dev/u?random|\$\(\s*date\b|`\s*date\b|\$\{?EPOCH)"
)
_SHELL_LOOSE = re.compile(r"(?m)^(?![^\n]*(?:/tests|\$|install|#[^\n]*pytest))[^\n]*\bpytest\b")
_SHELL_REWARD = re.compile(
    r"(?m)^[^#\n]*\b(?:cp|mv|cat|ln)\b[^\n]*(/app|/workspace|/home|/tmp|\$HOME|/logs/agent)[^\n]*"
    r"reward"
)


_PASSES = re.compile(
    r"^\s*(echo|printf)\s+['\"]?(1|1\.0|\{[^}]*:\s*1(\.0)?\})['\"]?\s*>\s*\S*reward\."
)
_FAILS = re.compile(r"(echo|printf)\s+['\"]?(0|0\.0|\{[^}]*:\s*0(\.0)?\})['\"]?\s*>\s*\S*reward\.")
_OPENS = re.compile(r"(?:^|[;&|]\s*|\s)(?:if|case|do|\{)(?=\s|$)")
_CLOSES = re.compile(r"(?:^|;\s*)\s*(?:fi|esac|done|\})(?=\s|;|$)")


def lint_tools(folder: Path, step: Step) -> None:
    """tools/*.py: the agent's side."""
    for path in sorted((folder / "tools").rglob("*.py")):
        tree = _tree(path)
        if tree is None:
            continue
        name = path.relative_to(folder).as_posix()
        for node in ast.walk(tree):
            where = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if (
                        isinstance(target, ast.Name)
                        and _ANSWER_NAME.match(target.id)
                        and _has_literal(node.value)
                    ):
                        step.add(
                            "oracle-in-agent-files",
                            where,
                            f"{target.id} holds an answer on the agent's side; keep it in "
                            "tests/data.json",
                        )
            if isinstance(node, ast.Call) and _dotted(node.func) in _UNSEEDED:
                step.add(
                    "unseeded-tools",
                    where,
                    f"{_dotted(node.func)} differs from run to run; draw from data's seed",
                    "warning",
                )
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = re.search(r"(?:^|/)(tests/(?:verify\.py|data\.json|test\.sh)|solution/\w)",
                                  node.value)  # fmt: skip
                if found:
                    step.add(
                        "oracle-in-agent-files",
                        where,
                        f"names {node.value[:60]!r}, which must stay out of the agent's reach",
                    )


_UNSEEDED = frozenset(
    {f"random.{name}" for name in (
        "random", "randint", "choice", "choices", "shuffle", "sample", "uniform", "randrange",
        "gauss", "getrandbits")}
    | {"os.urandom", "uuid.uuid4", "uuid.uuid1", "secrets.choice", "secrets.randbelow",
       "secrets.token_hex", "secrets.token_bytes", "secrets.SystemRandom",
       "random.SystemRandom", "uuid4"}
)  # fmt: skip


def lint_verifier(folder: Path, step: Step) -> None:
    """tests/*.py: the judge."""
    for path in sorted((folder / "tests").rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        tree = _tree(path)
        if tree is None:
            step.add("bad-verifier", name, "is not valid Python")
            continue
        for node in ast.walk(tree):
            _verifier_node(node, f"{name}:{getattr(node, 'lineno', 0)}", step)
        if path.name == "verify.py":
            _arguments_used(tree, name, step)


def _verifier_node(node: ast.AST, where: str, step: Step) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [
            node.module or ""]  # fmt: skip
        for module in names:
            if module.split(".")[0] in _NETWORK_MODULES:
                step.add(
                    "verifier-network",
                    where,
                    f"imports {module}: a verdict may not depend on the network",
                )
            if module == "random" or module.split(".")[0] == "secrets":
                step.add(
                    "verifier-random",
                    where,
                    f"imports {module}: the same artifacts must give the same verdict",
                    "warning",
                )
    if isinstance(node, ast.Call):
        called = _dotted(node.func)
        if called in _UNSEEDED:
            step.add(
                "nondeterministic-verifier",
                where,
                f"{called}: the same artifacts must give the same verdict",
            )
        elif any(called == name or called.endswith("." + name) for name in _CLOCK):
            step.add(
                "nondeterministic-verifier",
                where,
                f"{called}: a verdict may not depend on the day it is given; put the date into "
                "tests/data.json",
            )
        elif called in _LOADERS - {"compile"} or called in _UNPICKLE:
            step.add(
                "verifier-executes-agent-text",
                where,
                f"{called} in the verifier's own process lets what the agent wrote take it over; "
                "parse it, or run it as a process of its own and judge its output",
            )
        elif called in ("hash",):
            step.add(
                "nondeterministic-verifier",
                where,
                "hash() of text differs from process to process",
                "warning",
            )
    key = _state_key(node)
    if key is not None and _REWARD_NAME.match(key):
        step.add(
            "verifier-trusts-agent",
            where,
            f"takes {key!r} from the end state: the agent's side then judges itself; compare the "
            "state with tests/data.json",
        )


def _state_key(node: ast.AST) -> str | None:
    """KEY of ``end_state["KEY"]`` or ``end_state.get("KEY")``."""
    if isinstance(node, ast.Subscript) and _dotted(node.value) == "end_state":
        key = node.slice
    elif (
        isinstance(node, ast.Call)
        and _dotted(node.func) in ("end_state.get", "end_state.pop")
        and node.args
    ):
        key = node.args[0]
    else:
        return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _arguments_used(tree: ast.Module, name: str, step: Step) -> None:
    """A verifier that looks at neither the answer nor the world judges nothing."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name != "verify":
            continue
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if not used & {"final_text", "end_state", "kwargs"}:
            step.add(
                "constant-verifier", f"{name}:{node.lineno}", "looks at neither the final text nor "
                "the end state"
            )  # fmt: skip


def lint_shell(folder: Path, step: Step) -> None:
    """tests/*.sh"""
    for path in sorted((folder / "tests").rglob("*.sh")):
        name = path.relative_to(folder).as_posix()
        text = path.read_text("utf-8", "replace")
        early = _passes_first(text)
        if early is not None:
            step.add(
                "passes-by-default",
                f"{name}:{early}",
                "writes a passing reward before it judges: a judge that crashes or runs out of "
                "time then passes; write 0 first, and 1 only after the judge said so",
            )
        for match in _SHELL_NETWORK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            step.add(
                "verifier-network",
                f"{name}:{line}",
                f"{match[1]} at verification needs the network; put what the tests need into "
                "tests/ or the image",
            )
        for match in _SHELL_TESTS.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            step.add(
                "mutable-tests",
                f"{name}:{line}",
                f"runs {match['path']}, which the agent can write; keep tests in /tests",
            )
        for match in _SHELL_LUCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            step.add(
                "nondeterministic-verifier",
                f"{name}:{line}",
                f"{match[1]}: the same artifacts must give the same verdict on any day",
            )
        for match in _SHELL_LOOSE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            step.add(
                "mutable-tests",
                f"{name}:{line}",
                "pytest without a path collects tests that the agent can write; name /tests/...",
            )
        for match in _SHELL_REWARD.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            step.add(
                "verifier-trusts-agent",
                f"{name}:{line}",
                "takes the reward from a file the agent can write",
            )


def _passes_first(text: str) -> int | None:
    """The line that writes a passing reward before anything is judged, when a later one takes it
    back: a judge that crashes or is stopped then passes."""
    depth, found = 0, None
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.partition("#")[0] if not line.startswith("#!") else ""
        if found is not None and _FAILS.search(code):
            return found
        if depth == 0 and found is None and _PASSES.match(code):
            found = number
        depth = max(0, depth + len(_OPENS.findall(code)) - len(_CLOSES.findall(code)))
    return None


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text("utf-8", "replace"))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return ""


def _has_literal(node: ast.AST | None) -> bool:
    """A value written in the source, and not an empty one or a type."""
    if isinstance(node, ast.Constant):
        return node.value not in (None, "", 0, False)
    return isinstance(node, ast.List | ast.Tuple | ast.Dict | ast.Set) and any(
        isinstance(part, ast.Constant) for part in ast.walk(node)
    )
