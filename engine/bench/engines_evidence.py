"""The conformance suite against every engine, in its own environment; one JSON file of outcomes.

python -m engine.bench.engines_evidence [--only vllm,triton] [--again] [--out FILE]

Resumes: an engine whose last run was of this commit, and whole, is not run again. What an engine
declines is listed with the reason it gave.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "evidence" / "engines.json"
_SUITES = {
    "light, transformers, scripted": ("", ["tests/contracts/test_runtime.py"]),
    "http": ("", ["tests/contracts/test_http.py"]),
    "ray": ("", ["tests/ray/test_engine_actor.py"]),
    "vllm": ("vllm", ["tests/engine/adapters/test_vllm.py"]),
    "triton": ("triton", ["tests/engine/adapters/test_triton.py"]),
}
TIME_LIMIT_S = 3600


def main() -> int:
    """Exit status 1 when an engine failed or could not run."""
    parser = argparse.ArgumentParser(description="the MRI contract against every engine")
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--again", action="store_true", help="also what has run already")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    chosen = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = sorted(set(chosen) - {n for names in _SUITES for n in (names, *names.split(", "))})
    if unknown:
        parser.error(f"no engine {unknown[0]!r}; expected {', '.join(_SUITES)}")
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    commit = _commit()
    for name, (environment, files) in _SUITES.items():
        if chosen and not {name, *name.split(", ")} & set(chosen):
            continue
        before = known.get(name, {})
        if not options.again and before.get("commit") == commit and before.get("whole"):
            print(f"{name}: done at this commit, {_counts(before)}")  # noqa: T201
            continue
        known[name] = _run(name, environment, files) | {"commit": commit}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        print(f"{name}: {_counts(known[name])}", flush=True)  # noqa: T201
    ran = [known[name] for name in _SUITES if name in known]
    return int(any(not run["whole"] or run["failed"] for run in ran))


def _run(name: str, environment: str, files: list[str]) -> dict[str, Any]:
    python = Path(sys.executable)
    if environment:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        engines = Path(os.environ.get("PARL_ENGINES", home / "parl-engines"))
        python = engines / environment / "bin" / "python"
        if not python.is_file():
            why = f"no environment; run scripts/engine-venvs.sh {environment}"
            return {"whole": False, "failed": [], "passed": 0, "declined": {}, "why": why}
    with tempfile.TemporaryDirectory(prefix="parl-engines-") as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", *files, f"--junitxml={report}",
                   f"--basetemp={folder}/tests", "-p", "no:cacheprovider"]  # fmt: skip
        if environment:
            # that environment has neither hypothesis nor PostgreSQL's driver, and other warnings
            command += ["--noconftest", "-W", "ignore"]
        began = time.monotonic()
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, timeout=TIME_LIMIT_S,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            tail = done.stdout.splitlines()[-3:]
        except subprocess.TimeoutExpired:
            tail = [f"{name}: not done within {TIME_LIMIT_S} s"]
        found = _read(report) if report.is_file() else {"passed": 0, "failed": [], "declined": {}}
    whole = report_is_whole(found) and "not done" not in " ".join(tail)
    load = os.getloadavg()[0]
    return found | {"whole": whole, "seconds": round(time.monotonic() - began, 1),
                    "load_average": round(load, 1), "tail": tail}  # fmt: skip


def report_is_whole(found: dict[str, Any]) -> bool:
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
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
