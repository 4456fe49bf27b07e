"""Nearly right results: each planted flaw is found by its part of the check, sound ones by none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from sandbox.check.agent_code import try_agent_code
from sandbox.check.answers import (
    number_mutants,
    offered_answers,
    same_values,
    text_mutants,
    try_plain_writing,
)
from sandbox.check.arguments import try_arguments
from sandbox.check.clock import run_clock
from sandbox.check.effects import run_effects
from sandbox.check.episodes import Played, Stage, open_stage
from sandbox.check.findings import CheckReport, Step, report_text
from sandbox.check.hidden import solution_without_reading, try_hidden
from sandbox.check.idle import nop_is_paid
from sandbox.check.leaks import run_leaks
from sandbox.check.numbers import no_numbers
from sandbox.check.perturb import try_answers, try_artifacts
from sandbox.check.probe import probe_bundle, probe_spec
from sandbox.check.reachable import shared_code, solution_code
from sandbox.check.scripts import NOP, Script
from sandbox.check.shell_clock import shell_clock_spec
from sandbox.check.stated import lint_links, stated_form
from sandbox.check.subject import Case, Subject, folder_subject
from sandbox.check.worlds import other_process
from sandbox.check.written import Written, written_by
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.task import EnvironmentSpec, TaskSpec
from sandbox.templates.new import write_task
from tests.sandbox.check.near import NEAR
from tests.sandbox.check.planting import Flaw, edit
from tests.sandbox.conftest import best_level

DAYS = (timedelta(days=400),)


async def part_of(name: str, subject: Subject) -> Step:
    """Run one part of the check on a task, in real boxes."""
    step, case = Step(name), subject.cases[0]
    if name == "clock":
        async with open_stage(case.spec, subject.bundle, SandboxConfig(), MemoryLeases()) as stage:
            at = partial(shell_clock_spec, case.spec)
            return await run_clock(stage, at, DAYS, case.oracle, False)
    probe = probe_bundle(subject.bundle)
    spec = probe_spec(case.spec, probe)
    runs: list[Played] = []
    for _ in range(2 if name == "world" else 1):
        async with open_stage(spec, probe, SandboxConfig(), MemoryLeases()) as stage:
            if name == "world":
                runs.append(await stage.play(spec, case.oracle))
                continue
            written = await written_by(stage, spec, case.oracle)
            assert written.problem is None
            step = await _in_probe(name, stage, spec, subject, written)
    if runs:
        texts = [seen.text for seen in runs[1].observations]
        other_process(runs[0].observations, texts, True, step)
    return step


async def _in_probe(
    name: str, stage: Stage, spec: TaskSpec, subject: Subject, written: Written
) -> Step:
    step, case = Step(name), subject.cases[0]
    match name:
        case "answers":
            await try_answers(stage, spec, case.oracle, {}, written, step)
        case "artifacts":
            await try_artifacts(stage, spec, case.oracle, written, step)
        case "plain":
            await try_plain_writing(stage, spec, case.oracle, written, step)
        case "arguments":
            await try_arguments(stage, spec, case.oracle, written, step)
        case "hidden":
            await try_hidden(stage, spec, case.oracle, written, step)
        case "code":
            await try_agent_code(stage, spec, case.oracle, written, step)
        case "leaks":
            step = await run_leaks(stage, spec, case, subject, written)
        case "nop":
            nop_is_paid([await stage.play(spec, NOP)], step)
        case "effects":
            step = await run_effects(stage, spec, case, written)
        case "solution":
            solution_without_reading(case, written.texts, step)
            stated_form(case, step)
    return step


def planted(flaw: Flaw, parent: Path) -> Subject:
    folder = write_task(parent / "planted", "acme/planted", flaw.family)
    flaw.plant(folder)
    return folder_subject(folder, SandboxConfig())


QUICK = ("one percent is fine", "notes anywhere", "title nobody looks at", "items from nowhere",
         "a reward for quiet")  # fmt: skip
NAMES = [pytest.param(part, flaw, id=flaw.name.replace(" ", "-"),
                      marks=() if flaw.name in QUICK else pytest.mark.slow)
         for part, flaw in NEAR]  # fmt: skip


@pytest.mark.parametrize(("part", "flaw"), NAMES)
def test_what_is_nearly_right_is_not_paid(part: str, flaw: Flaw, tmp_path: Path):
    """The part of the check that is for it names the flaw."""
    best_level()
    step = asyncio.run(part_of(part, planted(flaw, tmp_path)))
    rules = {found.rule for found in step.findings if found.severity == "error"}
    assert flaw.rule in rules, step.findings


def mutants(answer: str) -> list[str]:
    return [mutant.text for mutant in number_mutants(answer)]


def test_numbers_beside_the_right_one():
    """By the last digit, by one percent, the sign, a digit more or less; words stay."""
    assert mutants("3075") == ["3076", "3074", "3106", "3044", "-3075", "30750", "13075", "307"]
    assert mutants("North 12.34")[:2] == ["North 12.35", "North 12.33"]
    assert mutants("7.2 15,000")[0] == "7.2 15,001"
    assert mutants("o-103") == [] == mutants("Kx-9A") == mutants("lamp")
    assert all(text != "0" for text in mutants("0"))


def test_things_that_are_written_alike():
    """Another case, another point; what stands in the world counts, and not a made-up name."""
    data = {"items": {"kX-9a": 1, "Kx-9A": 2, "lamp": 3, "lamp 2": 4}}
    found = {mutant.text for mutant in text_mutants("Kx-9A", data, ())}
    assert "kX-9a" in found and "lamp" not in found
    assert "lamp 2" in {mutant.text for mutant in text_mutants("lamp", data, ())}
    assert "12x34" in {mutant.text for mutant in text_mutants("12.34", data, ())}


@pytest.mark.parametrize(
    ("text", "answer", "same"),
    [
        ("The sum is 235 euros", "The sum is 235 euros.", True),
        ("xThe sum is 235 euros.", "The sum is 235 euros.", True),
        ("The sum is -235 euros.", "The sum is 235 euros.", False),
        ("The sum is 236 euros.", "The sum is 235 euros.", False),
        ("xThe dearest one is lamp.", "The dearest one is lamp.", True),
        ("The dearest one is lam", "The dearest one is lamp.", False),
        ("xKx-9A", "Kx-9A", False),
        ("Kx-9", "Kx-9A", False),
        ("a cable of 2 ", "a cable of 2 m", False),
        (" lamp.", "lamp", True),
    ],
)
def test_only_another_value_is_a_near_answer(text: str, answer: str, same: bool):
    """What a sentence says around its values does not count; a name counts as a whole."""
    environment = EnvironmentSpec(data={"items": {"lamp": 1, "Kx-9A": 2, "a cable of 2 m": 3}})
    spec = TaskSpec("a/b", "b", "Which one is dearest?", (), "", environment=environment)
    assert same_values(text, answer, spec, ()) is same


def test_every_number_is_replaced_by_none():
    """In JSON one by one and all together, also those in quotes; in tables the last line."""
    found = {each.text for each in no_numbers('{"a": 1, "b": {"c": ["2.5"]}, "d": true}')}
    assert '{"a": NaN, "b": {"c": ["2.5"]}, "d": true}' in found
    assert '{"a": 1, "b": {"c": ["-inf"]}, "d": true}' in found
    assert '{"a": 1e999, "b": {"c": [1e999]}, "d": true}' in found
    assert {"30.15", "nan", "-inf", "1e999", "", "930.15"} - {"30.15"} <= {
        text for each in no_numbers("30.15") for text in (each.text, each.control)
    }
    table = {each.text for each in no_numbers("a,b\n1,2\nx,3\n", table=True)}
    assert "a,b\n1,2\nx,nan\n" in table and all(text.startswith("a,b\n1,2\n") for text in table)
    assert list(no_numbers("o-103")) == [] == list(no_numbers('{"a": "b"}'))


def test_code_of_the_solution_under_another_name(tmp_path: Path):
    """With other paths it is found; what the solution repairs, and other code, is none."""
    folder = write_task(tmp_path / "x", "acme/x", "bash")
    code = solution_code(folder)
    body = next(
        text for name, text in code.programs.items() if name.startswith("solution/solve.sh")
    )
    lines = body.replace("/app/report.json", "out").replace("/app/logs-in", "in").splitlines()
    copied = "\n".join(["# how the logs are read", *lines, "print('ready')", ""])
    assert shared_code("environment/bench/tool.py", copied, code) == "solution/solve.sh"
    mine = (folder / "tests" / "judge.py").read_text()
    assert shared_code("environment/other.py", mine, code) is None
    repaired = replace(code, text=code.text + "cp tool.py old.py")
    assert shared_code("environment/bench/tool.py", copied, repaired) is None


def test_a_report_tells_many_of_a_kind_once():
    """What follows from a paid nop is one line; ten of a rule are one and a count."""
    report = CheckReport("x", "a/x", "1", "")
    nop, tamper, again = Step("nop"), Step("tamper"), Step("determinism")
    nop.add("passing-nop", "tests/", "doing nothing passes")
    for number in range(10):
        tamper.add("answer-spray", f"tamper: {number}", "scored 1, which passes")
        again.add("nondeterministic-verifier", f"{number}", "2 verdicts")
    report.steps = [nop, tamper, again]
    text = report_text(report)
    assert "10 results that are not right pass as well (answer-spray)" in text
    assert text.count("error:") == 3 and "and 9 more of this rule" in text
    assert "failed: 21 errors" in text


@pytest.mark.parametrize(
    ("instruction", "answer", "offered"),
    [
        ("Which is dearest? Answer with lamp, bolt or hinge.", "bolt", 3),
        ("Is it open? Answer yes or no.", "yes", 2),
        ("Answer A/B/C/D.", "C", 4),
        ("Which item is dearest? Answer with its name.", "lamp", 0),
        ("Say 对 or 错.", "错", 2),
    ],
)
def test_how_many_answers_an_instruction_offers(instruction: str, answer: str, offered: int):
    assert offered_answers(answer, TaskSpec("a/b", "b", instruction, (), "")) == offered


def test_tests_that_follow_links_are_told(tmp_path: Path):
    """Only where an answer lies beside them, and only as a warning: here no link is collected."""
    folder = write_task(tmp_path / "x", "acme/x", "bash")
    step = Step("lint")
    lint_links(folder, step)
    assert step.findings == []
    (folder / "tests" / "expected.json").write_text("{}")
    text = "import json\nopen('/app/report.json').read() == open('/tests/expected.json').read()\n"
    (folder / "tests" / "judge.py").write_text(text)
    lint_links(folder, step)
    assert [(each.rule, each.severity) for each in step.findings] == [("follows-links", "warning")]


@pytest.mark.slow
def test_a_tolerance_that_is_stated_is_no_flaw(tmp_path: Path):
    """One percent off is paid, and the instruction says so. (That it is one where nothing is said,
    and that the examples have none of these flaws, other tests show.)"""
    best_level()
    folder = write_task(tmp_path / "x", "acme/x", "http")
    near = 'not final_text.strip().isdigit() or abs(int(final_text) - data["cents"]) > 31'
    edit(folder / "tests" / "verify.py", 'final_text.strip() != str(data["cents"])', near)
    edit(folder / "instruction.md", "digits only", "digits only, within one percent")
    step = asyncio.run(part_of("answers", folder_subject(folder, SandboxConfig())))
    assert step.findings == []


@pytest.mark.parametrize(
    ("instruction", "answer", "told"),
    [
        ("Answer with the sum, digits only.", "3 items", True),
        ("Answer with the sum, digits only.", "-3,075.5", False),
        ("Reply with the name and the number only.", "North 12", False),
        ("Answer with a JSON object from name to price.", "lamp: 3", True),
        ("Answer in lower case.", "Lamp", True),
        ("The log has digits only. Answer with its name.", "lamp", False),
    ],
)
def test_the_form_that_is_asked_for(instruction: str, answer: str, told: bool):
    """Only what the sentence about the answer says counts."""
    step = Step("oracle")
    spec = TaskSpec("a/b", "b", instruction, (), "")
    stated_form(Case(spec, Script("oracle", final_text=answer)), step)
    assert bool(step.findings) is told
