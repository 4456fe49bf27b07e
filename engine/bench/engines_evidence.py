"""The conformance suite against every engine, in its own environment; one JSON file of outcomes.

python -m engine.bench.engines_evidence [--only vllm,triton] [--again] [--out FILE]

Resumes: a part whose last run was of this commit, and whole, is not run again; the file is written
after each part. What an engine declines is listed with the reason it gave.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench.engines import ROOT, interpreter
from engine.errors import EngineError

OUT = ROOT / "evidence" / "engines.json"
_VLLM = "tests/engine/adapters/test_vllm.py"


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run in one process, and are resumed as one."""

    name: str
    engines: tuple[str, ...]
    tests: tuple[str, ...]
    environment: str = ""


PARTS = (
    Part("in this process", ("light", "transformers", "scripted"),
         ("tests/contracts/test_runtime.py",)),
    Part("http", ("http",), ("tests/contracts/test_http.py",)),
    Part("ray", ("ray",), ("tests/ray/test_engine_actor.py",)),
    Part("triton", ("triton",), ("tests/engine/adapters/test_triton.py",), "triton"),
    # in three: each costs a start of vLLM, but an interruption only what it interrupts
    Part("vllm", ("vllm",),
         (f"{_VLLM}::TestVllm", f"{_VLLM}::test_declines_two_methods_and_no_more",
          f"{_VLLM}::test_tokens_are_light_engine_s"), "vllm"),
    Part("vllm, weights", ("vllm",), (_VLLM, "-k", "trap_b or trap_d"), "vllm"),
    Part("vllm, weights of experts", ("vllm",), (_VLLM, "-k", "trap_a or traps_a"), "vllm"),
)  # fmt: skip
TIME_LIMIT_S = 3600


def main() -> int:
    """Exit status 1 when an engine failed or could not run."""
    parser = argparse.ArgumentParser(description="the MRI contract against every engine")
    parser.add_argument("--only", default="", help="engines, comma-separated")
    parser.add_argument("--again", action="store_true", help="also what has run already")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=int, default=TIME_LIMIT_S, help="seconds a part may take")
    options = parser.parse_args()
    chosen = {name.strip() for name in options.only.split(",") if name.strip()}
    names = {engine for part in PARTS for engine in part.engines}
    if chosen - names:
        parser.error(f"no engine {min(chosen - names)!r}; expected {', '.join(sorted(names))}")
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    commit = _commit()
    wanted = [part for part in PARTS if not chosen or chosen & set(part.engines)]
    for part in wanted:
        before = known.get(part.name, {})
        same = before.get("commit") == commit and not commit.endswith("+changes")
        if not options.again and same and before.get("whole"):
            print(f"{part.name}: done at this commit, {_counts(before)}")  # noqa: T201
            continue
        known[part.name] = _run(part, options.limit) | {"commit": commit}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = options.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        temporary.replace(options.out)
        print(f"{part.name}: {_counts(known[part.name])}", flush=True)  # noqa: T201
    ran = [known[part.name] for part in wanted]
    return int(any(not run["whole"] or run["failed"] for run in ran))


def _run(part: Part, limit_s: float) -> dict[str, Any]:
    try:
        python = interpreter(part.environment)
    except EngineError as error:
        return {"whole": False, "failed": [], "passed": 0, "declined": {}, "why": str(error)}
    with tempfile.TemporaryDirectory(prefix="parl-engines-") as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", *part.tests, f"--junitxml={report}",
                   f"--basetemp={folder}/tests", "-p", "no:cacheprovider"]  # fmt: skip
        if part.environment:
            # that environment has neither hypothesis nor PostgreSQL's driver, and other warnings
            command += ["--noconftest", "-W", "ignore"]
        began = time.monotonic()
        lines, in_time = _finish(command, limit_s)
        found = _read(report) if report.is_file() else {"passed": 0, "failed": [], "declined": {}}
    tail = lines[-3:] if in_time else [*lines[-2:], f"not done within {limit_s:g} s"]
    return found | {
        "whole": in_time and report_is_whole(found),
        "seconds": round(time.monotonic() - began, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "tail": tail,
    }


def _finish(command: list[str], limit_s: float) -> tuple[list[str], bool]:
    """(lines of output, whether it ended in time); what it started ends with it."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    in_time = True
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        in_time = False
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    except BaseException:
        # interrupted: the engine's processes are in a group of their own and would stay
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return said.splitlines(), in_time


def report_is_whole(found: dict[str, Any]) -> bool:
    """Whether any test said something; all skipped is none."""
    return bool(found["passed"] or found["failed"])


def _read(report: Path) -> dict[str, Any]:
    passed, failed, declined = 0, [], {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}.{case.get('name')}"
        skipped = case.find("skipped")
        if skipped is not None:
            declined[name] = skipped.get("message", "")
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "declined": declined}


def _counts(run: dict[str, Any]) -> str:
    if not run["whole"]:
        return f"NOT RUN: {run.get('why') or run.get('tail')}"
    reasons = sorted(set(run["declined"].values()))
    text = f"{run['passed']} passed, {len(run['failed'])} failed, {len(run['declined'])} declined"
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def _commit() -> str:
    """HEAD, with "+changes" when tracked files outside evidence/ differ from it."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changes = subprocess.run(
        ["git", "status", "--porcelain", "-uno", "--", ".", ":!evidence"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
