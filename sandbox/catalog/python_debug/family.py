"""PythonDebug: a small package with failing tests, made from correct modules by one or two bugs.

The bugs are line edits (``mutations.py``) that some shown test notices. Half of the calls in
``cases.py`` are shown as unittest files; the verifier makes all of them. Held-out instances have
other bugs than training ones. Budget unit: lines of code.
"""

from __future__ import annotations

import functools
from typing import Any

from sandbox.catalog.draws import Draws
from sandbox.catalog.generated import Accepts, Call, Drawn, GeneratedFamily
from sandbox.catalog.python_debug.cases import CASES, Case
from sandbox.catalog.python_debug.mutations import Mutant, broken, load_mutants, source_of

PACKAGES = ("toolbox", "workshop", "basics", "kit", "bench", "parts", "office", "cellar")
NUM_MODULES = (2, 3)
INSTRUCTIONS = {
    "en": "The package {package} has failing tests. Find and repair the {bugs} in its modules; the "
    "docstrings say what is right. More tests than the ones you see will be run, on the modules "
    "only. Reply with done when you are finished.",
    "zh": "软件包 {package} 的测试没有通过。请找出并修复模块中的{bugs}，"
    "正确的行为以文档字符串为准。之后还会运行更多看不到的测试，而且只检查模块本身。"
    "完成后回答 done。",
}
BUGS = {"en": ("bug", "two bugs"), "zh": ("一个错误", "两个错误")}


class PythonDebug(GeneratedFamily):
    """The family; task types are the language of the instruction."""

    name = "python_debug"

    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """See ``GeneratedFamily``."""
        package = draws.choice(PACKAGES)
        modules = sorted(draws.sample(sorted(CASES), draws.between(*NUM_MODULES)))
        num_bugs = draws.between(1, 2)
        bugs = [draws.choice(_mutants_of(module)) for module in draws.sample(modules, num_bugs)]
        if not accepts(*(bug.identity for bug in bugs)):
            return None
        by_module = {bug.module: bug for bug in bugs}
        files = {f"{package}/__init__.py": "", "tests/__init__.py": ""}
        num_lines = 0
        for module in modules:
            text = source_of(module)
            if module in by_module:
                text = broken(text, by_module[module])
            num_lines += len(text.splitlines())
            files[f"{package}/{module}.py"] = text
            files[f"tests/test_{module}.py"] = tests_text(package, module)
        rounds: list[tuple[Call, ...]] = [(("run_tests", {}),)]
        rounds += [(("read_file", {"path": f"{package}/{bug.module}.py"}),) for bug in bugs]
        rounds += [(("replace_text", _repair(package, bug)),) for bug in bugs]
        rounds.append((("run_tests", {}),))
        return Drawn(
            instruction=INSTRUCTIONS[task_type].format(
                package=package, bugs=BUGS[task_type][num_bugs - 1]
            ),
            world={"files": files},
            judge={
                "package": package,
                "modules": modules,
                "calls": [
                    [module, function, arguments, answer]
                    for module in modules
                    for (function, arguments), answer in zip(
                        CASES[module], expected(module), strict=True
                    )
                ],
            },
            units={"code_lines": float(num_lines)},
            rounds=tuple(rounds),
            final_text="done",
        )


@functools.cache
def _mutants_of(module: str) -> tuple[Mutant, ...]:
    return tuple(mutant for mutant in load_mutants() if mutant.module == module)


@functools.cache
def expected(module: str) -> tuple[list[Any], ...]:
    """["value", answer] or ["raises", exception] of every case, by the correct module (shipped
    with PARL, so it runs here)."""
    namespace: dict[str, Any] = {}
    exec(compile(source_of(module), module, "exec"), namespace)
    return tuple(_answer(namespace, case) for case in CASES[module])


def _answer(namespace: dict[str, Any], case: Case) -> list[Any]:
    function, arguments = case
    try:
        return ["value", namespace[function](*arguments)]
    except ValueError as error:
        return ["raises", type(error).__name__]


def tests_text(package: str, module: str) -> str:
    """The shown half of a module's cases as a unittest file."""
    lines = [
        "import unittest",
        "",
        f"from {package} import {module}",
        "",
        "",
        f"class {module.title()}Test(unittest.TestCase):",
    ]
    shown = list(zip(CASES[module], expected(module), strict=True))[::2]
    for number, ((function, arguments), (kind, answer)) in enumerate(shown, 1):
        call = f"{module}.{function}({', '.join(map(repr, arguments))})"
        lines.append(f"    def test_{function}_{number}(self):")
        if kind == "raises":
            lines += [f"        with self.assertRaises({answer}):", f"            {call}", ""]
        else:
            lines += [f"        self.assertEqual({call}, {answer!r})", ""]
    return "\n".join(lines).rstrip() + "\n"


def _repair(package: str, bug: Mutant) -> dict[str, Any]:
    """Arguments of replace_text; whole lines, because the broken one may be part of another."""
    return {
        "path": f"{package}/{bug.module}.py",
        "old": "\n" + bug.new + "\n",
        "new": "\n" + bug.old + "\n",
    }
