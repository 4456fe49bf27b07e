"""Evidence of the sandbox: items, the verdict over the attack suite, the summary."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from parl.bench import attack_suite, sandbox_evidence
from parl.bench.attack_suite import Case, Row, judged, read_cases, read_rows
from parl.bench.command import ROOT
from parl.bench.records import Item, Records, measure
from sandbox.bench.kill_leaks import VICTIMS

TABLE = """
| fork bomb | a `test_fork` | pass | pass | pass | open |
| host side | e `test_copy` | pass | pass | pass | pass |
"""
REPORT = """<testsuites><testsuite>
<testcase name="test_fork[A]"/><testcase name="test_fork[B]"/>
<testcase name="test_fork[docker]"><skipped message="level docker: no engine"/></testcase>
<testcase name="test_copy[x-y]"/>
<testcase name="test_other[A-1]"><failure message="AssertionError: a&#10;b"/></testcase>
</testsuite></testsuites>"""


def test_every_row_of_the_table_is_an_item():
    """The real document; each row's test is in its file."""
    text = (ROOT / "docs" / "security.md").read_text()
    rows = read_rows(text)
    assert len(rows) == text.split("## Attacks and tests")[1].split("\n## ")[0].count("\n| ") - 1
    for row in rows:
        source = (ROOT / "tests" / "sandbox" / attack_suite.FILES[row.key]).read_text()
        assert f"def {row.test}(" in source


def test_a_row_holds_when_its_cases_ran_and_passed(tmp_path: Path):
    """A skip does not hold and gives its reason; a level that did not run does not hold."""
    rows = read_rows(TABLE)
    assert rows[0] == Row("fork bomb", "a", "test_fork", ("docker", "A", "B"))
    (tmp_path / "report.xml").write_text(REPORT)
    cases = list(read_cases(tmp_path / "report.xml"))
    assert cases[-1] == Case("test_other", "A", "failure: AssertionError: a")
    found = judged(rows, cases)
    assert not found["ok"]
    assert found["held"] == {"docker": "1 of 2", "A": "2 of 2", "B": "2 of 2", "C": "1 of 1"}
    assert found["problems"] == ["fork bomb, docker: skipped: level docker: no engine"]
    assert judged(rows, cases[:2])["problems"][0] == "fork bomb, docker: did not run"
    passed = [Case(c.test, c.level, None) for c in cases]
    assert judged(rows, passed)["ok"]


def test_kills_hit_everybody_at_both_levels():
    """Twenty, and every kind of victim at each level."""
    kills = [item.measure._kill for item in sandbox_evidence.kill_items()]  # type: ignore[attr-defined]
    assert len(kills) == 20
    assert len({(kill.level, kill.victims) for kill in kills}) == 2 * len(VICTIMS)


def test_names_are_unique_and_the_summary_is_short(tmp_path: Path):
    """What is there is summed up, what failed is named."""
    names = [item.name for item in sandbox_evidence.all_items(tmp_path)]
    assert len(set(names)) == len(names)
    assert {"warm", "cold", "waits", "kill-00", "kill-19", "attacks-a", "attacks-d"} <= set(names)
    bar = {
        "name": "warm exec p50",
        "value": 1.0,
        "limit": 2.0,
        "unit": "ms",
        "peer": "",
        "ok": True,
    }
    made = {
        "warm": {"ok": True, "bars": [bar], "load": {"before": 0.5, "after": 0.6}},
        "kill-00": {"ok": True, "boxes": 6, "gone_s": 1.5},
        "kill-01": {"ok": False, "problem": "level docker does not work here"},
        "attacks-a": {"ok": True, "held": {"A": "19 of 19"}},
        "attacks-k": {"ok": False, "held": {"A": "9 of 10"}},
    }
    text = sandbox_evidence.summary(made)
    assert "1.00 ms < 2: ok, load 0.5 -> 0.6" in text and "kills: 1 of 2 left nothing" in text
    assert "attacks: A 28 of 29 rows hold" in text
    assert text.splitlines()[-2:] == ["FAILED: kill-01", "FAILED: attacks-k"]


def test_measuring_goes_on_where_it_stopped(tmp_path: Path):
    """Only what has no record, at most ``limit``, all again with ``redo``."""
    asked: list[str] = []

    def item(name: str, ok: bool) -> Item:
        return Item(name, lambda: asked.append(name) or {"ok": ok})

    items = [item("a-1", True), item("a-2", False), item("b-1", True)]
    lines: list[str] = []
    path = tmp_path / "e.json"
    made, wanted = measure(Records(path), items, only=["a"], limit=1, say=lines.append)
    assert (list(made), wanted, asked) == (["a-1"], 2, ["a-1"])
    made, wanted = measure(Records(path), items, say=lines.append)
    assert (list(made), wanted, asked) == (["a-1", "a-2", "b-1"], 3, ["a-1", "a-2", "b-1"])
    assert "    FAILED in 0 s" in lines
    measure(Records(path), items, only=["b"], redo=True, say=lines.append)
    assert asked[-1] == "b-1" and len(asked) == 4


def test_the_command_reads_what_is_there(tmp_path: Path):
    """--limit 0 measures nothing; a record that does not hold is exit code 1."""
    record = {"ok": False, "boxes": 6, "gone_s": 10.2}
    (tmp_path / "sandbox.json").write_text(json.dumps({"records": {"kill-00": record}}))
    done = CliRunner().invoke(
        sandbox_evidence.app, ["--limit", "0", "--only", "kill", "--folder", str(tmp_path)]
    )
    assert done.exit_code == 1 and "1 of 20 records" in done.output
