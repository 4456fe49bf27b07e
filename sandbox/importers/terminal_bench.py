"""terminal-bench v1: ``task.yaml``, ``Dockerfile``, ``tests/``, ``solution.sh``, ``run-tests.sh``.

A task passes when all its tests pass. Its pytest is run by sandbox.shell.runner.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from sandbox.errors import TaskError
from sandbox.importers.base import (
    Imported,
    ImportResult,
    manifest_text,
    new_folder,
    read_text,
    write_files,
)
from sandbox.importers.recorded import task_name
from sandbox.task import load_task

_NOT_WORLD = frozenset({"tests", "solution.sh", "solution.yaml", "run-tests.sh", "task.yaml",
                        "docker-compose.yaml", "docker-compose.yml", ".git"})  # fmt: skip
_TEST_SH = """#!/bin/bash
# The reward of terminal-bench v1: all tests pass, or nothing.
export TEST_DIR=/tests
{command}
if [ $? -eq 0 ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""


def import_terminal_bench(source: Path, dest: Path, limit: int) -> ImportResult:
    """``source``: a task folder or a folder of them. TaskError when there is none."""
    if (source / "task.yaml").is_file():
        folders = [source]
    else:
        folders = sorted(path.parent for path in source.glob("*/task.yaml"))
    if not folders:
        raise TaskError(f"{source}: no task.yaml here or one folder below")
    result = ImportResult()
    for folder in folders[: limit or None]:
        try:
            result.tasks.append(_import(folder, dest))
        except TaskError as error:
            result.skipped.append(f"{folder.name}: {error}")
    return result


def _import(folder: Path, dest: Path) -> Imported:
    data = _yaml(folder / "task.yaml")
    if not isinstance(data, dict) or not str(data.get("instruction", "")).strip():
        raise TaskError(f"{folder / 'task.yaml'}: no instruction")
    name = folder.resolve().name
    downgrades: list[str] = []
    solution = _solution(folder, downgrades)
    command = _tests(folder, downgrades)
    target = new_folder(dest, name)
    try:
        _world(folder, target, downgrades)
        shutil.copytree(folder / "tests", target / "tests")
        if "run-tests.sh" in command:
            shutil.copy(folder / "run-tests.sh", target / "tests" / "run-tests.sh")
        write_files(
            target,
            {
                "task.toml": _manifest(name, data, downgrades),
                "instruction.md": str(data["instruction"]).strip() + "\n",
                "tests/test.sh": _TEST_SH.format(command=command),
                **({"solution/solve.sh": solution} if solution else {}),
            },
        )
        notes = load_task(target).notes
    except BaseException:
        shutil.rmtree(target)
        raise
    return Imported(target, list(dict.fromkeys([*downgrades, *notes])))


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise TaskError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from error


def _manifest(name: str, data: dict[str, Any], downgrades: list[str]) -> str:
    for key in ("run_tests_in_same_shell", "disable_asciinema"):
        if data.get(key):
            downgrades.append(f"{key}: tests run in a box of their own")
    timeout_s = float(data.get("max_agent_timeout_sec", 360))
    return manifest_text(
        name=task_name("terminal-bench", name),
        task_type=str(data.get("category") or "terminal-bench"),
        source="terminal-bench",
        keywords=[str(tag) for tag in data.get("tags") or []],
        timeout_sec=timeout_s,
        verifier_timeout_sec=float(data.get("max_test_timeout_sec", 60)),
        parl={"budget": {"call_timeout_s": min(120.0, timeout_s)}},
    )


def _solution(folder: Path, downgrades: list[str]) -> str:
    if (folder / "solution.sh").exists():
        return read_text(folder / "solution.sh")
    if not (folder / "solution.yaml").exists():
        downgrades.append("no solution: the oracle cannot be played")
        return ""
    commands = _yaml(folder / "solution.yaml")
    lines = [str(entry["command"]) for entry in commands if isinstance(entry, dict)
             and "command" in entry] if isinstance(commands, list) else []  # fmt: skip
    downgrades.append("solution.yaml: its key strokes are joined into a script")
    return "\n".join(["#!/bin/bash", *lines, ""])


def _tests(folder: Path, downgrades: list[str]) -> str:
    """The command that runs the tests."""
    if not (folder / "tests").is_dir():
        raise TaskError("no tests/ folder, so nothing can be judged")
    script = folder / "run-tests.sh"
    if script.exists() and not re.search(r"\bpytest\b", read_text(script)):
        return "bash /tests/run-tests.sh"
    files = sorted(path.name for path in (folder / "tests").glob("test_*.py"))
    if not files:
        raise TaskError("tests/ holds no test_*.py and run-tests.sh runs pytest")
    if script.exists():
        downgrades.append("run-tests.sh: its installation of pytest is not run")
    return "pytest " + " ".join(f"/tests/{name}" for name in files)


def _world(folder: Path, target: Path, downgrades: list[str]) -> None:
    """Everything but tests and solution is the build context."""
    environment = target / "environment"
    environment.mkdir()
    for path in sorted(folder.iterdir()):
        if path.name in _NOT_WORLD:
            if path.name.startswith("docker-compose"):
                services = (_yaml(path) or {}).get("services", {})
                if len(services) > 1:
                    downgrades.append(f"{path.name}: only one of {len(services)} services is there")
            continue
        if path.is_dir():
            shutil.copytree(path, environment / path.name)
        else:
            shutil.copy(path, environment / path.name)
