"""parl task check on whole tasks: the examples pass, the numbers are right, errors are clear."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandbox.catalog.registry import get_family
from sandbox.check.findings import report_text
from sandbox.check.run import CheckSettings, check_family, check_folder
from sandbox.check.scripts import NOP, Script, random_script, read_script
from sandbox.check.timing import percentile, utf8_tokens
from sandbox.errors import TaskError
from sandbox.manifest.reading import load_manifest
from sandbox.session import RawCall
from sandbox.task import load_task
from sandbox.templates.new import FAMILIES, write_task
from tests.sandbox.conftest import best_level

STEPS = ["schema", "lint", "build", "oracle", "nop", "agents", "attacks", "tamper", "leaks",
         "effects", "determinism", "clock", "cassettes", "timing"]  # fmt: skip


def test_an_example_passes_and_the_report_holds_every_number(tmp_path: Path):
    """Steps in order, flake bound, suggestions; the JSON and the text tell the same."""
    best_level()
    said: list[str] = []
    folder = write_task(tmp_path / "demo", "acme/demo", "python")
    report = asyncio.run(check_folder(folder, CheckSettings(repeat=3, say=said.append)))
    assert report.passed, report_text(report)
    assert [step.name for step in report.steps] == STEPS
    assert len(said) == len(STEPS) - 2  # schema and lint come before any box
    assert report.flake["trials"] == 6 and report.flake["failures"] == 0
    assert report.flake["upper_95"] == pytest.approx(1 - 0.05 ** (1 / 6))
    assert report.suggestions["min_tokens"] > 60 and report.level in ("A", "B")
    assert "3 episodes of oracle and nop each are too few to certify" in report.notes[-1]
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["passed"] is True and plain["steps"][3]["data"]["passed"] == 3
    assert report_text(report).endswith("passed")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_example_passes_as_written(family: str, tmp_path: Path):
    """`parl task new` gives a task that its own check finds nothing wrong with."""
    best_level()
    folder = write_task(tmp_path / "demo", "acme/demo", family)
    report = asyncio.run(check_folder(folder, CheckSettings(repeat=3)))
    assert report.passed and report.findings == [], report_text(report)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_is_a_harbor_folder(family: str, tmp_path: Path):
    """Every key is Harbor's but those of [metadata.parl]; the files Harbor runs are there."""
    folder = write_task(tmp_path / "demo", "acme/demo", family)
    manifest = load_manifest(folder / "task.toml")
    assert manifest.schema_version == "1.4" and manifest.task.name == "acme/demo"
    for name in ("instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"):
        assert (folder / name).is_file()
    assert load_task(folder).spec.name == "acme/demo"


@pytest.mark.slow
def test_a_shipped_family_passes():
    """Instances by seed: the oracle solves all, nop none."""
    best_level()
    report = asyncio.run(check_family(get_family("lookup_calc"), None, CheckSettings(repeat=3)))
    assert report.passed and report.findings == [], report_text(report)
    assert report.task_types == ["lookup", "add"]
    assert report.steps[2].data["passed"] == report.steps[2].data["runs"] == 8


def test_what_is_no_task_is_not_checked(tmp_path: Path):
    with pytest.raises(TaskError, match=r"no task.toml"):
        asyncio.run(check_folder(tmp_path))


def test_names_and_places_of_new_tasks(tmp_path: Path):
    """A name Harbor refuses, an unknown family and an existing folder are one clear line."""
    with pytest.raises(TaskError, match=r"expected org/name"):
        write_task(tmp_path / "a", "no good/name", "python")
    with pytest.raises(TaskError, match=r"one of python, http, mcp, bash"):
        write_task(tmp_path / "a", "x", "perl")
    write_task(tmp_path / "a", "x", "bash")
    with pytest.raises(TaskError, match=r"exists already"):
        write_task(tmp_path / "a", "x", "bash")


def test_scripts_are_read_with_their_line_in_errors(tmp_path: Path):
    """One call a line, several in a turn, the answer last."""
    path = tmp_path / "calls.jsonl"
    path.write_text(
        '{"name": "a", "arguments": {"x": 1}}\n\n'
        '{"calls": [{"name": "b"}, {"name": "c", "arguments": "{}"}]}\n{"final_text": "7"}\n'
    )
    script = read_script(path, "oracle")
    assert script.rounds == ((RawCall("a", '{"x": 1}'),), (RawCall("b", "{}"), RawCall("c", "{}")))
    assert script.final_text == "7" and script.num_calls == 3
    for line, said in (("{", "not valid JSON"), ('{"tool": "a"}', "expected")):
        path.write_text('{"final_text": ""}\n' + line + "\n")
        with pytest.raises(TaskError, match=rf"calls.jsonl:2: .*{said}"):
            read_script(path, "oracle")


def test_random_agents_make_valid_calls_and_repeat_themselves(tmp_path: Path):
    """The same seed gives the same script; other seeds give others."""
    spec = load_task(write_task(tmp_path / "demo", "acme/demo", "mcp")).spec
    scripts = [random_script(spec, seed) for seed in range(4)]
    assert scripts[0] == random_script(spec, 0) and len({s.rounds for s in scripts}) == 4
    for script in scripts:
        for (call,) in script.rounds:
            arguments = json.loads(call.arguments_text)
            assert arguments["day"] in ("mon", "tue", "wed", "thu", "fri")


def test_percentiles_and_tokens():
    """Nearest rank; bytes plus markers."""
    assert percentile([3, 1, 2], 0.5) == 2 and percentile([3, 1, 2], 0.95) == 3
    assert percentile([], 0.5) == 0.0
    assert utf8_tokens(NOP) == 1
    assert utf8_tokens(Script("x", ((RawCall("f", "{}"),),), "é")) == 3 + (3 + 4 + 3)
