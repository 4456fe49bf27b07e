"""Verifier of a plain Harbor task: tests/test.sh over the collected artifacts, in a box of its own.

Shipped to the box as text; standard library only. The reward is read from logs/verifier, first
reward.json and then reward.txt, as Harbor 0.26 does (facts/sandboxes.md 1.1).
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def verify(final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """``data``: roots, tests {path: {base64, mode}}, env, cwd, timeout_s, artifacts (the places
    that the agent's files take); files and run of the Dockerfile, or base "/" in a container of the
    image. A missing or unreadable reward gives an answer without ``correctness``: the verifier
    failed, not the policy."""
    if end_state.get("too_large"):
        return {"correctness": 0.0, "reasons": ["the artifacts are larger than the limit"]}
    if data.get("base"):  # the box is emptied afterwards
        return _verify(Path(data["base"]), final_text, end_state["files"], data)
    base = Path(tempfile.mkdtemp(prefix="verify-"))
    try:
        return _verify(base, final_text, end_state["files"], data)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _verify(
    base: Path, final_text: str, files: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    for root in data["roots"]:
        (base / root).mkdir(exist_ok=True)
    problem = _build(base, data)
    if problem is not None:
        return {"error": problem}
    for path in data.get("artifacts", []):
        _clear(base / path.lstrip("/"))
    rewards = base / "logs" / "verifier"
    _clear(rewards)
    rewards.mkdir(parents=True, exist_ok=True)
    for path, entry in files.items():
        if not path.startswith(("/tests/", "/logs/verifier")):
            _place(base, path, entry, data)
    agent = base / "logs" / "agent"
    agent.mkdir(parents=True, exist_ok=True)
    (agent / "answer.txt").write_text(final_text, encoding="utf-8", errors="replace")
    for path, entry in data["tests"].items():
        _put(base / "tests" / path, _content(base, entry, data["roots"]), entry["mode"])
    code, output = _run(base, data)
    output = _shown(output, base)
    reward = _reward(rewards)
    if isinstance(reward, str):
        return {"error": f"{reward}; test.sh: {code}; {output[-300:]}"}
    return {"correctness": reward, "reasons": [output[-300:]] if output else []}


def _build(base: Path, data: dict[str, Any]) -> str | None:
    """The world as the image has it, where there is no image; what went wrong, if anything."""
    for path, entry in data.get("files", {}).items():
        _put(base / path.lstrip("/"), _content(base, entry, data["roots"]), entry["mode"])
    for command in data.get("run", []):
        done = subprocess.run(
            [_SHELL, "-c", _translate(command, data["roots"], str(base))],
            cwd=base,
            env=_environment(base, data),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=data["timeout_s"],
            check=False,
        )
        if done.returncode != 0:
            output = done.stdout.decode("utf-8", "replace")[-300:]
            return f"RUN {command}: exit status {done.returncode}: {_shown(output, base)}"
    return None


def _environment(base: Path, data: dict[str, Any]) -> dict[str, str]:
    """Variables of the image and the task, their folders named as they are here."""
    given = {key: _value(value, data["roots"], str(base)) for key, value in data["env"].items()}
    tests = str(base / "tests")
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(base),
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        **given,
        # no script's folder is on the path by itself, so that of the tests is named
        "PYTHONPATH": ":".join(filter(None, (tests, given.get("PYTHONPATH")))),
    }


def _clear(path: Path) -> None:
    """Nothing of the image is left at a place that the agent's files take."""
    if path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            _clear(child)
            if child.is_dir() and not child.is_symlink():
                child.rmdir()
    elif path.exists() or path.is_symlink():
        path.unlink()


_SKIPPED = '#!/bin/sh\necho "skipped: $(basename "$0") needs a network"\nexit 0\n'
_PYTEST = '#!/bin/sh\nexec {pytest} "$@"\n'
_UVX = """#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != pytest ]; do shift; done
[ $# -eq 0 ] && exit 0
shift
exec {pytest} "$@"
"""
_PYTHON = """#!/bin/sh
number=0
before=
for word in "$@"; do
    number=$((number + 1))
    if [ "$before$word" = -mpytest ]; then
        shift "$number"
        exec {pytest} "$@"
    fi
    case "$word" in
        -m) before=-m ;;
        -*) before= ;;
        *) break ;;
    esac
done
exec {python} "$@"
"""
"""A command and no module on a path: it answers before any folder that the agent can write to."""


def _stand_ins(base: Path, runner: str, path: str) -> Path:
    """Commands that tests call to install pytest and to run it: the image's own pytest where there
    is one, else sandbox.shell.runner under the image's Python, else under this one."""
    folder = Path(tempfile.mkdtemp(prefix="stand-ins-", dir=base if str(base) != "/" else "/tmp"))
    (folder / "runner.py").write_text(runner)
    own = shutil.which("python3", path=path) if str(base) == "/" else None
    here = f'env "LD_LIBRARY_PATH={os.environ.get("LD_LIBRARY_PATH", "")}" "{sys.executable}"'
    python = f'"{own}"' if own else here if str(base) == "/" else f'"{sys.executable}"'
    pytest = f'{python} -I "{folder}/runner.py"'
    if own and _has_pytest(own, path):
        pytest = f"{python} -m pytest"
    texts: dict[str, str] = dict.fromkeys(
        ("apt-get", "apt", "apk", "curl", "wget", "pip", "pip3"), _SKIPPED
    )
    filled = {"python": python, "pytest": pytest}
    texts["pytest"] = texts["py.test"] = _PYTEST.format(**filled)
    texts["uvx"] = texts["uv"] = _UVX.format(**filled)
    texts["python3"] = texts["python"] = _PYTHON.format(**filled)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def _has_pytest(python: str, path: str) -> bool:
    command = [python, "-I", "-c", "import pytest"]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def _run(base: Path, data: dict[str, Any]) -> tuple[str, str]:
    """(how test.sh ended, its output)"""
    environment = _environment(base, data)
    if data.get("runner"):
        home = Path(environment["HOME"])
        with contextlib.suppress(OSError):  # an image's home may be read-only: nothing to source
            (home / ".local" / "bin").mkdir(parents=True, exist_ok=True)
            (home / ".local" / "bin" / "env").write_text("")
        path = environment["PATH"]
        environment["PATH"] = f"{_stand_ins(base, data['runner'], path)}:{path}"
    cwd = base / data["cwd"].lstrip("/")
    cwd.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [_SHELL, str(base / "tests" / "test.sh")],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=data["timeout_s"])
        ending = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ending = "stopped at the time limit"
    return ending, output.decode("utf-8", "replace").strip()


def _reward(folder: Path) -> float | str:
    """The number, or why there is none."""
    for name in ("reward.json", "reward.txt"):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            value = json.loads(text) if name.endswith("json") else float(text)
        except ValueError:
            return f"{name} holds {text[:60]!r}, expected a number"
        if isinstance(value, dict):
            numbers = list(value.values())
            if "reward" in value:
                value = value["reward"]
            elif len(numbers) == 1:
                value = numbers[0]
            else:
                return f"{name} has keys {sorted(value)}; expected 'reward' or a single one"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} holds {text[:60]!r}, expected a number"
        if not math.isfinite(value):
            return f"{name} holds {text[:60]!r}, expected a finite number"
        return float(value)
    return "no reward.json or reward.txt in /logs/verifier"


def _place(base: Path, path: str, entry: dict[str, Any], data: dict[str, Any]) -> None:
    """An artifact, at its own place; the box may lie about paths, so they are checked again."""
    parts = path.lstrip("/").split("/")
    places = data.get("artifacts") or [f"/{root}" for root in data["roots"]]
    inside = any(f"/{'/'.join(parts)}/".startswith(f"{place.rstrip('/')}/") for place in places)
    if inside and ".." not in parts and "" not in parts:
        _put(base.joinpath(*parts), _content(base, entry, data["roots"]), entry["mode"])


def _content(base: Path, entry: dict[str, Any], roots: list[str]) -> bytes:
    """Bytes of a file; a text has its folders named as they are here."""
    content = base64.b64decode(entry["base64"])
    with contextlib.suppress(UnicodeDecodeError):  # a binary file names no folders
        return _translate(content.decode(), roots, str(base)).encode()
    return content


def _put(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod((mode | 0o400) & 0o777)


def _value(text: str, roots: list[str], base: str) -> str:
    """A variable's value, whose folders may be joined by colons."""
    return ":".join(_translate(part, roots, base) for part in text.split(":"))


def _translate(text: str, roots: list[str], base: str) -> str:
    if not roots:
        return text
    names = "|".join(re.escape(root) for root in roots)
    return re.sub(rf"(?<![\w./:~-])/({names})(?![\w-])", rf"{base}/\1", text)


def _shown(text: str, base: Path) -> str:
    """``text`` with the folders named as the task names them."""
    if str(base) == "/":
        return text
    return re.sub(rf"{re.escape(str(base))}(?![\w-])(/?)", "/", text)
