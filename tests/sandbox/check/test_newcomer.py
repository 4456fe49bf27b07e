"""What a newcomer's tasks hid from the check: leaks in texts and data bases, orders, hostile
answers, end states that cannot be told."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.check.answer_text import answer_in_text
from sandbox.check.box_walk import walk_code, walked
from sandbox.check.episodes import Stage, open_stage
from sandbox.check.findings import Step
from sandbox.check.hostile import try_hostile
from sandbox.check.order import reordered, try_orders
from sandbox.check.probe import probe_bundle, probe_spec
from sandbox.check.reads import run_reads
from sandbox.check.scripts import Script
from sandbox.check.subject import Case, folder_subject
from sandbox.check.written import Written
from sandbox.config import SandboxConfig
from sandbox.fakes import MemoryLeases
from sandbox.session import RawCall
from sandbox.task import TaskSpec, load_task
from sandbox.tool_spec import ToolSpec
from tests.sandbox.check.planting import edit
from tests.sandbox.conftest import best_level

TOOLS = """
from sandbox.toolkit import ToolError, tool, workdir

def setup(data):
    (workdir() / "log").write_text("")

@tool(effect="read", idempotent=True)
def loans() -> str:
    \"\"\"All loans.\"\"\"
    return "L-101 L-102 L-103"

@tool(effect="write")
def take_back(loan_id: str) -> str:
    \"\"\"Take back a loan.\"\"\"
    with (workdir() / "log").open("a") as file:
        file.write(loan_id + " ")
    return "done"

def end_state():
    return {"log": (workdir() / "log").read_text().split()}
"""
VERIFY = """
import re
def verify(final_text, end_state, data):
    return {"correctness": float(sorted(end_state["log"]) == ["L-101", "L-103"]
                                 and final_text.strip() == "840")}
"""
TOML = """
schema_version = "1.4"
[task]
name = "acme/loans"
[verifier]
timeout_sec = 2
[metadata.parl]
task_type = "loans"
"""
CALLS = [("take_back", "L-101"), ("take_back", "L-103")]


def task(folder: Path) -> Path:
    calls = [{"name": name, "arguments": {"loan_id": loan}} for name, loan in CALLS]
    lines = [{"name": "loans", "arguments": {}}, {"calls": calls}, {"final_text": "840"}]
    files = {
        "task.toml": TOML,
        "instruction.md": "Take back the loans of Ada due before today; answer with her fine.\n",
        "tools/tools.py": TOOLS,
        "tests/verify.py": VERIFY,
        "tests/data.json": "{}",
        "environment/data.json": "{}",
        "solution/calls.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def found(
    folder: Path, work: Callable[[Stage, TaskSpec, Case, Step], Awaitable[object]]
) -> list[tuple[str, str, str]]:
    """(rule, severity, message) of one part of the check, in a real box."""
    best_level()
    subject = folder_subject(folder)
    case, step = subject.cases[0], Step("part")
    probe = probe_bundle(subject.bundle)
    spec = probe_spec(case.spec, probe)

    async def run() -> None:
        async with open_stage(spec, probe, SandboxConfig(), MemoryLeases()) as stage:
            await work(stage, spec, case, step)

    asyncio.run(run())
    return [(each.rule, each.severity, each.message) for each in step.findings]


async def orders(stage: Stage, spec: TaskSpec, case: Case, step: Step) -> object:
    return await try_orders(stage, spec, case.oracle, step)


async def hostile(stage: Stage, spec: TaskSpec, case: Case, step: Step) -> object:
    return await try_hostile(stage, spec, case.oracle, step)


async def reads(stage: Stage, spec: TaskSpec, case: Case, step: Step) -> object:
    return await run_reads(stage, spec, case, (), step)


def test_an_order_that_nobody_announced_is_told(tmp_path: Path) -> None:
    """Only where the other order is not paid, and the instruction sets none."""
    folder = task(tmp_path)
    assert found(folder, orders) == []
    edit(folder / "tests" / "verify.py", "sorted(end_state", "(end_state")
    ((rule, severity, message),) = found(folder, orders)
    assert (rule, severity) == ("unannounced-order", "warning") and "score 0 " in message
    (folder / "instruction.md").write_text("Take back L-101 first, then L-103.\n")
    assert found(folder, orders) == []


def test_only_independent_changes_are_reordered(tmp_path: Path) -> None:
    """A round in reverse; calls of one tool on different things; nothing else."""
    spec = load_task(task(tmp_path)).spec
    one, two = (RawCall("take_back", json.dumps({"loan_id": loan})) for loan in ("a", "b"))
    read = RawCall("loans", "{}")
    assert [script.rounds for script in reordered(spec, Script("o", ((one, read, two),)))] == [
        ((two, read, one),)
    ]
    assert [
        script.rounds for script in reordered(spec, Script("o", ((one,), (read,), (two,))))
    ] == [((two,), (read,), (one,))]
    assert reordered(spec, Script("o", ((one,), (read,), (one,)))) == []
    assert reordered(spec, Script("o", ((read,), (one,)))) == []


@pytest.mark.slow
def test_a_verifier_that_runs_for_ever_is_told(tmp_path: Path) -> None:
    """An exponential pattern has no verdict within the verifier's own limit."""
    folder = task(tmp_path)
    assert found(folder, hostile) == []
    pattern = r're.fullmatch(r"(\s*\d+)+\s*", final_text) is not None'
    edit(folder / "tests" / "verify.py", 'final_text.strip() == "840"', pattern)
    ((rule, severity, message),) = found(folder, hostile)
    assert (rule, severity) == ("hostile-answer", "warning") and "within 2 s" in message


def test_an_end_state_that_fails_is_no_change(tmp_path: Path) -> None:
    """The finding says what failed, and does not call the read a write."""
    folder = task(tmp_path)
    edit(folder / "tools" / "tools.py", '    return "L-101', '    (workdir() / "log").unlink()\n'
         '    return "L-101')  # fmt: skip
    told = found(folder, reads)
    assert told[0][0] == "not-checked" and "effect-mislabeled" not in {each[0] for each in told}
    assert "end_state() failed (FileNotFoundError: " in told[0][2]
    text = (folder / "tools" / "tools.py").read_text()
    (folder / "tools" / "tools.py").write_text(text.replace(".unlink()", '.write_text("x")'))
    assert [rule for rule, _, _ in found(folder, reads)] == ["effect-mislabeled"]


def told_in(spec: TaskSpec, texts: tuple[str, ...] = (), answer: str = "840") -> list[str]:
    calls = tuple(RawCall(name, json.dumps({"loan_id": loan})) for name, loan in CALLS)
    step = Step("leaks")
    answer_in_text(Case(spec, Script("oracle", (calls,), answer)), Written(texts=texts), step)
    assert all(each.severity == "warning" for each in step.findings)
    return [f"{each.rule} {each.where}" for each in step.findings]


def test_an_answer_printed_in_a_text_is_told(tmp_path: Path) -> None:
    """In the instruction, a description, a schema; but no short, offered or other text."""
    spec = load_task(task(tmp_path)).spec
    seen = ("L-101 L-102 L-103",)
    instruction = "answer-in-text instruction.md"
    assert told_in(spec, seen) == []
    for text, answer, finding in (
        ("Digits only, e.g. 840.", "840", instruction),
        ("Digits only, e.g. 840.", "The fine is 840", instruction),
        ("Digits only, e.g. 84.", "84", None),
        ("There are 840 books.", "The fine is 840", None),
        ("Answer red, tan or sky.", "tan", None),
        ("Answer yes or no.", "yes", None),
        ("One of:\n- red\n- tan\n", "tan", None),
        ("Digits only, e.g. 1840 or 840.5.", "840", None),
    ):
        assert told_in(replace(spec, instruction=text), seen, answer) == (
            [finding] if finding else []
        ), text

    def described(description: str, schema: dict[str, object] | None = None) -> TaskSpec:
        tools = [
            replace(tool, description=description, schema=schema or tool.schema)
            if tool.name == "take_back"
            else tool
            for tool in spec.tools
        ]
        assert isinstance(tools[0], ToolSpec)
        return replace(spec, tools=tuple(tools))

    tool = ["answer-in-text tool take_back"]
    assert told_in(described("Take back, e.g. L-101 or L-103."), seen) == tool
    assert told_in(described("Take back, e.g. L-101."), seen) == []
    assert told_in(described("Take back, e.g. L-101."), ()) == tool
    assert told_in(described("Any of L-101, L-102 and L-103."), seen) == []
    schema = {"type": "object", "properties": {"loan_id": {"type": "string"}}}
    assert told_in(described("Take back.", schema), ()) == []
    schema["properties"] = {"loan_id": {"type": "string", "examples": ["L-103"]}}
    assert told_in(described("Take back.", schema), ()) == tool
    schema["properties"] = {"loan_id": {"type": "string", "enum": ["L-101", "L-103"]}}
    assert told_in(described("Take back.", schema), ()) == []


def test_large_files_and_data_bases_are_searched(tmp_path: Path) -> None:
    """A megabyte of a file, every row of a data base, and what cannot be sent is counted."""
    base = sqlite3.connect(tmp_path / "desk.db")
    with base:
        base.execute("create table loans (id text, note)")
        base.executemany("insert into loans values (?, ?)", [(f"L-{n}", n) for n in range(3000)])
        base.execute("create table hint (x)")
        base.execute("insert into hint values (?)", ("the answer is 840",))
    base.close()
    assert (tmp_path / "desk.db").stat().st_size > 20_480
    (tmp_path / "log.txt").write_text("line of a log\n" * 60_000 + "the last line")
    (tmp_path / "noise").write_bytes(base64.b64encode(os.urandom(750_000)))
    (tmp_path / "more-noise").write_bytes(base64.b64encode(os.urandom(700_000)))
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    code = walk_code().replace('os.listdir("/")', "[]")  # here is no box: this folder only
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, check=True
    )
    assert len(done.stdout) < 1 << 20
    seen = walked(done.stdout.decode())
    rows = seen["files"]["desk.db (sqlite)"]
    assert "L-2999 | 2999" in rows and rows.endswith("the answer is 840")
    assert "the last line" in seen["files"]["log.txt"] and "broken.db" in seen["files"]
    assert "noise" in seen["cut"] and "more-noise" not in seen["cut"]
    with pytest.raises(ValueError, match=r"."):
        walked("no answer")
