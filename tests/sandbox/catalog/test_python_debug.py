"""python_debug: its verifier takes sources as data, and its bugs are real."""

import json

import pytest

from sandbox.catalog.python_debug.cases import CASES
from sandbox.catalog.python_debug.mutations import broken, load_mutants, noticed, source_of
from sandbox.session import RawCall
from tests.sandbox.catalog.playing import family_of, judge, oracle_agent, play

FAMILY = family_of("python_debug")
SPEC = FAMILY.instance(0, 0, "train", "en")
PACKAGE, MODULES = SPEC.verifier.data["package"], SPEC.verifier.data["modules"]
RIGHT = {f"{PACKAGE}/{module}.py": source_of(module) for module in MODULES}
FIRST = f"{PACKAGE}/{MODULES[0]}.py"


def verdict(files: object) -> dict:
    """Of an end state with these files."""
    return judge(FAMILY, SPEC, "done", {"files": files})


def test_the_modules_alone_count():
    """Right sources pass, whatever else lies beside them; the untouched package does not."""
    assert verdict(RIGHT)["correctness"] == 1.0
    trap = {
        f"{PACKAGE}/__init__.py": "import os; os._exit(0)",
        "conftest.py": "raise SystemExit",
        "tests/__init__.py": "raise SystemExit",
        "json.py": "raise SystemExit",
        f"{PACKAGE}/os.py": "raise SystemExit",
    }
    assert verdict({**trap, **RIGHT})["correctness"] == 1.0
    assert verdict(SPEC.environment.data["files"])["correctness"] == 0.0


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "no files"),
        ([], "no files"),
        ({}, "is missing"),
        ({**RIGHT, FIRST: 5}, "is missing"),
        ({**RIGHT, FIRST: "x" * 70_000}, "too long"),
        ({**RIGHT, FIRST: "def ("}, "not valid Python"),
        ({**RIGHT, FIRST: "(" * 5000}, "not valid Python"),
        ({**RIGHT, FIRST: "\x00"}, "not valid Python"),
        ({**RIGHT, FIRST: ""}, "answer wrongly"),
        ({**RIGHT, FIRST: "raise SystemExit"}, "does not end well"),
        ({**RIGHT, FIRST: "raise ValueError"}, "answer wrongly"),
        ({**RIGHT, FIRST: "x = [0] * 10**10"}, "answer wrongly"),
    ],
)
def test_tampered_end_states_fail(files: object, reason: str):
    """Missing, huge, broken or hostile sources are worth 0, never an error of the verifier."""
    answer = verdict(files)
    assert answer["correctness"] == 0.0
    assert reason in answer["reasons"][0]


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "import os.path as math",
        "from subprocess import run",
        "from . import conftest\nimport sys",
        "import dataclasses\ndataclasses.sys.exit()",
        "import collections\ncollections._sys.exit()",
        "from dataclasses import sys",
        "from re import *",
        "open('/etc/passwd')",
        "__import__('os')",
        "().__class__.__base__.__subclasses__()",
        "eval('1')",
        "getattr([], 'x')",
        "import math\nmath.modules",
        "import threading",
    ],
)
def test_sources_that_reach_for_the_machine_are_refused(code: str):
    """Before anything runs."""
    answer = verdict({**RIGHT, FIRST: f"{code}\n{RIGHT[FIRST]}"})
    assert answer["correctness"] == 0.0
    assert "for which the package has no use" in answer["reasons"][0]


def test_answers_are_compared_strictly():
    """NaN, infinity, True for 1, and a value that equals everything are not the right answer."""
    names = {function for function, _ in CASES[MODULES[0]]}
    for value in ("float('nan')", "float('inf')", "True", "Any()", "object()", "10**5000"):
        fake = "class Any:\n    def __eq__(self, other):\n        return True\n"
        fake += "".join(f"def {name}(*arguments):\n    return {value}\n" for name in names)
        assert verdict({**RIGHT, FIRST: fake})["correctness"] == 0.0


def test_a_harmless_rewrite_passes():
    """Helpers, imports of pure modules, copies and prints are the agent's own business."""
    source = f"import re, functools\nimport collections\n{RIGHT[FIRST]}\n"
    source += "def helper(rows):\n    print(re.compile('x'), rows.copy())\n    return rows\n"
    assert verdict({**RIGHT, FIRST: source})["correctness"] == 1.0


@pytest.mark.slow
def test_a_source_that_never_ends_is_worth_nothing():
    """A time limit of the verifier's own, not an error."""
    answer = verdict({**RIGHT, FIRST: "while True:\n    pass\n"})
    assert (answer["correctness"], "too slow" in answer["reasons"][0]) == (0.0, True)


def test_every_bug_still_fits_its_module():
    """A module that is edited needs its bugs made anew."""
    mutants = load_mutants()
    assert len(mutants) > 250 and {mutant.module for mutant in mutants} == set(CASES)
    for mutant in mutants:
        assert broken(source_of(mutant.module), mutant) != source_of(mutant.module)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_shown_tests_notice_every_bug():
    """mutants.json is what mutations.py writes (one module of the eleven)."""
    found = [mutant for mutant in load_mutants() if mutant.module == "ledger"]
    assert list(noticed("ledger")) == found


def test_changing_the_tests_repairs_nothing():
    """An agent that empties the tests sees them pass and gets 0; the oracle sees them pass too."""
    tests = [name for name in SPEC.environment.data["files"] if name.startswith("tests/test_")]
    cheat = tuple(
        (RawCall("write_file", json.dumps({"path": name, "text": "x = 1\n"})),) for name in tests
    )
    runs = ((RawCall("run_tests", "{}"),),)
    refused = tuple(
        (RawCall("write_file", json.dumps({"path": path, "text": ""})),)
        for path in ("../x.py", "/etc/x.py", "a/b/c/d.py")
    )
    oracle, cheater, climber = play(
        FAMILY, [oracle_agent(FAMILY, SPEC), (SPEC, cheat + runs, "done"), (SPEC, refused, "done")]
    )
    assert "FAILED" in oracle.observations[1].text
    assert oracle.observations[-1].text.endswith("OK")
    assert "FAILED" not in cheater.observations[-1].text
    assert cheater.verdict.correctness == 0.0
    assert [seen.error for seen in climber.observations[1:]] == ["tool_error"] * 3
