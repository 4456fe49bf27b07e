"""The command behind make evidence-engines: its parts exist, and nothing outlives a part's time."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from engine.bench.engines import ROOT
from engine.bench.engines_evidence import PARTS, _finish, _read, report_is_whole

_CASES = """<testsuites><testsuite>
<testcase classname="tests.test_it.TestIt" name="test_a"/>
<testcase classname="tests.test_it.TestIt" name="test_b"><failure message="no"/></testcase>
<testcase classname="tests.test_it" name="test_c"><skipped message="declined: tiers"/></testcase>
<testcase classname="tests.test_it" name="test_d"><error message="no start"/></testcase>
</testsuite></testsuites>"""


def test_vllm_s_parts_are_all_its_tests():
    """Each test is in exactly one part, or it would be run twice or never."""
    parts = [part for part in PARTS if part.environment == "vllm"]
    file = next(word for part in parts for word in part.tests if word.endswith(".py"))
    names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    assert len(names) > 5
    for name in names:
        taken = [
            part.name
            for part in parts
            if f"{file}::{name}" in part.tests
            or ("-k" in part.tests and any(w in name for w in part.tests[-1].split(" or ")))
        ]
        assert len(taken) == 1, (name, taken)


def test_files_of_the_parts_exist():
    for part in PARTS:
        for word in part.tests:
            if ".py" in word:
                assert (ROOT / word.split("::")[0]).is_file(), word


def test_outcomes_are_read_from_the_report(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(_CASES)
    found = _read(report)
    assert found == {
        "passed": 1,
        "failed": ["TestIt.test_b", "test_it.test_d"],
        "declined": {"test_it.test_c": "declined: tiers"},
    }
    assert report_is_whole(found)
    assert not report_is_whole({"passed": 0, "failed": [], "declined": {"a": "no vLLM"}})


def test_a_part_out_of_time_ends_with_its_children(tmp_path: Path):
    """A grandchild too: vLLM and Triton are processes that pytest started."""
    note = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    limit = 1.0
    while True:
        lines, in_time = _finish([sys.executable, "-c", program], limit)
        assert not in_time
        if lines or limit > 100:
            break
        # a busy machine: it had not begun
        limit *= 4
    assert lines == ["begun"]
    child = int(note.read_text())
    until = time.monotonic() + 20
    while _lives(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(child)


def test_what_ends_by_itself_is_in_time():
    assert _finish([sys.executable, "-c", "print('a\\nb')"], 300) == (["a", "b"], True)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
