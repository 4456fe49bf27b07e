"""Small hand-written examples of each format become tasks whose oracle passes and nop does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandbox.check.episodes import open_stage
from sandbox.check.scripts import NOP, Script, oracle_of
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.fakes import MemoryLeases
from sandbox.importers import registry
from sandbox.importers.base import ImportResult
from sandbox.importers.harbor import export_family
from sandbox.importers.registry import import_from
from sandbox.importers.tau2 import tools_of
from sandbox.manifest.reading import load_manifest
from sandbox.session import RawCall
from sandbox.task import load_task
from tests.sandbox.conftest import best_level

FORMATS = Path(__file__).parents[2] / "data" / "formats"
SOURCES = {
    "harbor": "harbor",
    "terminal-bench": "terminal_bench",
    "nemo-gym": "nemo_gym/rows.jsonl",
    "tau2": "tau2/shop",
    "bfcl": "bfcl/simple.jsonl",
}


def imported(format_name: str, tmp_path: Path, limit: int = 0) -> ImportResult:
    return import_from(format_name, FORMATS / SOURCES[format_name], tmp_path / "out", limit)


def scores(folder: Path, *scripts: Script) -> list[float | None]:
    """Correctness of each script, played in one box."""
    best_level()
    loaded = load_task(folder)

    async def play() -> list[float | None]:
        async with open_stage(loaded.spec, loaded.bundle, SandboxConfig(), MemoryLeases()) as stage:
            played = [await stage.play(loaded.spec, script) for script in scripts]
        return [one.verdict.correctness for one in played]

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("format_name", "number"),
    [("harbor", 0), ("harbor", 1), ("harbor", 2), ("terminal-bench", 0), ("nemo-gym", 0),
     ("nemo-gym", 1), ("nemo-gym", 2), ("tau2", 0), ("bfcl", 0), ("bfcl", 1)],
)  # fmt: skip
def test_the_oracle_of_the_format_passes_and_nop_does_not(
    format_name: str, number: int, tmp_path: Path
):
    task = imported(format_name, tmp_path).tasks[number]
    oracle = oracle_of(task.folder, load_task(task.folder).spec)
    assert scores(task.folder, oracle, NOP) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["hello", "old", "totals"])
def test_a_plain_harbor_folder_runs_unchanged(name: str):
    """Nothing is imported and nothing written: the public format as it is."""
    folder = FORMATS / "harbor" / name
    assert scores(folder, oracle_of(folder, load_task(folder).spec), NOP) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("format_name", "number", "said"),
    [
        ("harbor", 0, "the network is off in a box"),
        ("harbor", 0, "pytest is PARL's small runner"),
        ("harbor", 0, "image python:3.12-slim is not used"),
        ("harbor", 1, "environment.memory = '512M' is written memory_mb = 512"),
        ("harbor", 1, "[task] has no name"),
        ("terminal-bench", 0, "its installation of pytest is not run"),
        ("nemo-gym", 0, "the row has no tools"),
        ("nemo-gym", 0, "responses_create_params.temperature"),
        ("nemo-gym", 1, "tools do nothing"),
        ("nemo-gym", 2, "difficulty: not used; what it asks for is not checked"),
        ("harbor", 2, "environment.env.CURRENCY = ${SHOP_CURRENCY:-EUR}: variables of the host"),
        ("harbor", 2, "image python:3.12-slim is not used"),
        ("tau2", 0, "tools.py does not run in a box: no class derives from DB"),
        ("tau2", 0, "user simulator"),
        ("tau2", 0, "DB: the writing calls are compared"),
        ("tau2", 0, "NL_ASSERTION: not checked"),
        ("bfcl", 0, "tool math.triangle_area is called math_triangle_area"),
    ],
)
def test_every_downgrade_is_said(format_name: str, number: int, said: str, tmp_path: Path):
    lines = imported(format_name, tmp_path).tasks[number].downgrades
    assert any(said in line for line in lines), lines


@pytest.mark.parametrize(
    ("format_name", "said"),
    [
        ("nemo-gym", "rows.jsonl:3: verifier_metadata and the row have keys"),
        ("tau2", "task 1: nothing is left to judge"),
        ("bfcl", "simple.jsonl:3 irrelevance_2: no ground_truth"),
        ("bfcl", "simple.jsonl:4 multi_turn_base_3: a multi-turn row"),
    ],
)
def test_what_cannot_be_judged_is_skipped_with_its_reason(
    format_name: str, said: str, tmp_path: Path
):
    assert any(line.startswith(said) for line in imported(format_name, tmp_path).skipped)


def call(name: str, **arguments: object) -> tuple[RawCall, ...]:
    return (RawCall(name, json.dumps(arguments)),)


def test_bfcl_accepts_what_its_answers_accept(tmp_path: Path):
    """Optional arguments, other accepted values, any order; not another value nor a call more."""
    first, second = imported("bfcl", tmp_path).tasks
    area = "math_triangle_area"
    assert scores(
        first.folder,
        Script("optional", (call(area, base=10, height=5, unit="Square Metres"),)),
        Script("as a float", (call(area, base=10, height=5.0),)),
        Script("wrong", (call(area, base=10, height=6),)),
        Script("twice", (call(area, base=10, height=5), call(area, base=5, height=10))),
    ) == [1.0, 1.0, 0.0, 0.0]
    book = "book_table"
    lyon, nice = ({"city": "Lyon", "people": 2, "time": "19:30"},
                  {"city": "Nice", "people": 4, "time": "19:30"})  # fmt: skip
    assert scores(
        second.folder,
        Script("other order", (call(book, **nice), call(book, **lyon))),
        Script("one missing", (call(book, **nice),)),
    ) == [1.0, 0.0]


def test_tau2_reads_come_from_the_data_base(tmp_path: Path):
    """Reads are free, the writes must be right, and the customer must be told."""
    folder = imported("tau2", tmp_path).tasks[0].folder
    cancel = call("cancel_order", order_id="W1", reason="ordered by mistake")
    assert scores(
        folder,
        Script("no reads", (cancel,), "Order W2 was delivered."),
        Script("not told", (cancel,), "Done."),
        Script("another order", (call("cancel_order", order_id="W2",
                                      reason="ordered by mistake"),), "delivered"),
        Script("one too many", (cancel, call("cancel_order", order_id="W2",
                                             reason="no longer needed")), "delivered"),
    ) == [1.0, 0.0, 0.0, 0.0]  # fmt: skip


def test_tau2_signatures_are_read_and_not_run():
    """Types, defaults and literals become a schema; a file that runs code on import is harmless."""
    tools = tools_of("raise SystemExit\n" + (FORMATS / "tau2/shop/tools.py").read_text(), "t.py")
    assert [(tool.name, tool.effect) for tool in tools] == [
        ("get_order", "read"), ("cancel_order", "write"), ("note_items", "write")]  # fmt: skip
    assert tools[1].schema["properties"]["reason"] == {
        "enum": ["no longer needed", "ordered by mistake"]
    }
    assert tools[2].schema["required"] == ["items"]
    with pytest.raises(TaskError, match=r"no method decorated"):
        tools_of("x = 1", "t.py")


def test_imports_have_limits_and_clear_errors(tmp_path: Path):
    """Unknown format, missing source, a broken row, a folder that is there."""
    assert len(imported("bfcl", tmp_path, limit=1).tasks) == 1
    with pytest.raises(TaskError, match=r"did you mean 'bfcl'"):
        import_from("bfc", FORMATS, tmp_path)
    with pytest.raises(TaskError, match=r"does not exist"):
        import_from("bfcl", tmp_path / "none", tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(TaskError, match=r"rows.jsonl: holds no row"):
        import_from("bfcl", tmp_path / "rows.jsonl", tmp_path / "x")
    with pytest.raises(TaskError, match=r"exists already"):
        imported("bfcl", tmp_path)


@pytest.mark.parametrize(
    ("format_name", "source", "said"),
    [
        ("harbor", "bfcl/simple.jsonl", "is a file; SRC of harbor is a task folder with task.toml"),
        (
            "terminal-bench",
            "bfcl/simple.jsonl",
            "is a file; SRC of terminal-bench is a task folder",
        ),
        ("nemo-gym", "nemo_gym", "is a folder; SRC of nemo-gym is a file of JSON lines"),
        ("bfcl", "bfcl", "is a folder; SRC of bfcl is a file of JSON lines"),
        ("tau2", "tau2/shop/tasks.json", "is a file; SRC of tau2 is the folder of one domain"),
        ("tau2", "tau2", "has no tasks.json, db.json, tools.py; SRC of tau2 is the folder"),
    ],
)
def test_the_wrong_kind_of_source_says_the_right_one(
    format_name: str, source: str, said: str, tmp_path: Path
):
    """One line, without the words of the operating system."""
    with pytest.raises(TaskError) as caught:
        import_from(format_name, FORMATS / source, tmp_path / "x")
    text = str(caught.value)
    assert said in text and "Errno" not in text and len(text.splitlines()) == 1
    assert set(registry.SOURCES) == set(registry.FORMATS)


BROKEN_ROWS = {
    "{": "not valid JSON",
    "[1]": "expected a JSON object",
    '{"responses_create_params": {"input": "Q", "tools": [{"type": "function"}]}, '
    '"verifier_metadata": {"answer": "1"}}': "a tool has no name",
    '{"responses_create_params": {"input": [1]}, "verifier_metadata": {"answer": "1"}}':
    "input holds no text",
    '{"responses_create_params": {"input": "Q"}, "verifier_metadata": {"expected_calls": '
    '[{"name": "f", "arguments": [1]}]}}': "can be judged",
}  # fmt: skip


def test_a_broken_row_is_skipped_with_its_number(tmp_path: Path):
    """The rows around it are imported."""
    good = (FORMATS / "nemo_gym" / "rows.jsonl").read_text().splitlines()[:2]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([good[0], *BROKEN_ROWS, good[1]]) + "\n")
    result = import_from("nemo-gym", file, tmp_path / "out")
    assert len(result.tasks) == 2
    numbered = {line.split(": ")[0]: line for line in result.skipped}
    for number, said in enumerate(BROKEN_ROWS.values(), start=2):
        assert said in numbered[f"rows.jsonl:{number}"]


def test_a_shipped_instance_is_exported_as_harbor(tmp_path: Path):
    """The folder loads again and its oracle is in it."""
    assert export_family("lookup_calc/add", 3, 1, tmp_path / "out")
    assert not export_family("acme/unknown", 0, 0, tmp_path / "none")
    loaded = load_task(tmp_path / "out")
    assert oracle_of(tmp_path / "out", loaded.spec).num_calls == 3
    assert load_manifest(tmp_path / "out" / "task.toml").schema_version == "1.4"
    with pytest.raises(TaskError, match=r"known: lookup, add"):
        export_family("lookup_calc/ad", 0, 0, tmp_path / "other")
