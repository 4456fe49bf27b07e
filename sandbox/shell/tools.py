"""A plain Harbor task's world inside a box: a shell over the files of its environment.

Shipped to the box as text, run there; standard library only. Harbor names absolute folders (/app,
/tests, /logs, /solution); a box has one writable folder. They live below it, and their paths are
translated in commands, scripts and answers, so a task reads the same as in its container. In a
container of the task's own image (``base`` is "/") the folders are what they are called.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sandbox.toolkit import ToolError, tool, workdir

MAX_ARTIFACT_BYTES = 4 << 20
MAX_ARTIFACT_FILES = 2000
MAX_DEPTH = 16
WORLD = ".world.json"
"""What tools need to know; in a file, because a killed worker loses its memory."""
_SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def setup(data: dict[str, Any]) -> None:
    """``data``: roots, files {path: {base64, mode}}, run [commands], env, cwd, artifacts, base."""
    base = Path(data.get("base") or workdir())
    for root in data["roots"]:
        (base / root).mkdir(exist_ok=True)
    for path, entry in data["files"].items():
        target = base / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        content = _renamed(base64.b64decode(entry["base64"]), data["roots"])
        target.write_bytes(content)
        target.chmod(entry["mode"])
    (base / data["cwd"].lstrip("/")).mkdir(parents=True, exist_ok=True)
    kept = {key: data[key] for key in ("roots", "env", "cwd", "artifacts", "call_timeout_s")}
    (workdir() / WORLD).write_text(json.dumps({**kept, "base": str(base)}))
    if str(base) == "/":
        os.chdir(data["cwd"])  # where code that runs beside the tools starts
    for command in data["run"]:
        code, output = _shell(command, kept["call_timeout_s"])
        if code != 0:
            raise RuntimeError(f"RUN {command}: exit status {code}: {output[-300:]}")


@tool(effect="write")
def bash(command: str) -> str:
    """Run a shell command; the answer is its output and, when not 0, its exit status."""
    code, output = _shell(command, _world()["call_timeout_s"])
    if code is None:
        return f"{output}\n[stopped after the time limit]"
    return output if code == 0 else f"{output}\n[exit status {code}]"


@tool(effect="write")
def write_file(path: str, content: str) -> str:
    """Write a text file, replacing what was there."""
    target = _inside(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(_renamed(content.encode(), _world()["roots"]))
    except OSError as error:
        raise ToolError(f"{path} cannot be written: {error.strerror}") from error
    return f"wrote {len(content.encode())} bytes to {path}"


@tool(effect="read")
def read_file(path: str) -> str:
    """Text of a file."""
    target = _inside(path)
    if not target.is_file():
        raise ToolError(f"no file {path}")
    try:
        text = target.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror}") from error
    return _shown(text, _world()["roots"])


def end_state() -> dict[str, Any]:
    """The artifacts as {path: {base64, mode}}: regular files only, links are never followed."""
    world = _world()
    base = Path(world["base"])
    files: dict[str, Any] = {}
    refused: list[str] = []
    total = 0
    for root in world["artifacts"]:
        for path in _walk(base, base / root.lstrip("/"), 0, refused):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                refused.append(str(path.relative_to(base)))
                continue
            with os.fdopen(fd, "rb") as file:
                state = os.fstat(fd)
                total += state.st_size
                if not stat.S_ISREG(state.st_mode):
                    refused.append(str(path.relative_to(base)))
                    continue
                if total > MAX_ARTIFACT_BYTES or len(files) >= MAX_ARTIFACT_FILES:
                    return {"files": {}, "too_large": True}
                content = file.read(MAX_ARTIFACT_BYTES)
            with contextlib.suppress(UnicodeDecodeError):  # a binary file names no folders
                content = _shown(content.decode(), world["roots"]).encode()
            files["/" + str(path.relative_to(base))] = {
                "base64": base64.b64encode(content).decode(),
                "mode": stat.S_IMODE(state.st_mode) & 0o777,
            }
    return {"files": files, "refused": sorted(refused)[:50]}


def _walk(base: Path, path: Path, depth: int, refused: list[str]) -> list[Path]:
    """Files below ``path`` in order; links and special files go to ``refused``."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return []
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode) or depth > MAX_DEPTH:
        refused.append(str(path.relative_to(base)))
        return []
    found: list[Path] = []
    for child in sorted(path.iterdir()):
        found += _walk(base, child, depth + 1, refused)
    return found


def _world() -> dict[str, Any]:
    return json.loads((workdir() / WORLD).read_text())


def _inside(path: str) -> Path:
    """Where a path of the task is in the box; relative ones start at its working directory."""
    world = _world()
    text = path if path.startswith("/") else f"{world['cwd']}/{path}"
    root = text.lstrip("/").split("/")[0]
    if root not in world["roots"]:
        return Path(text)
    return workdir() / text.lstrip("/")


def _translate(text: str, roots: list[str], base: str) -> str:
    if not roots:
        return text
    names = "|".join(re.escape(root) for root in roots)
    return re.sub(rf"(?<![\w./:~-])/({names})(?![\w-])", rf"{base}/\1", text)


def _value(text: str, roots: list[str], base: str) -> str:
    """A variable's value, whose folders may be joined by colons."""
    return ":".join(_translate(part, roots, base) for part in text.split(":"))


def _renamed(content: bytes, roots: list[str]) -> bytes:
    """A text file with its folders named as they are here."""
    try:
        return _translate(content.decode(), roots, str(workdir())).encode()
    except UnicodeDecodeError:
        return content


def _shown(text: str, roots: list[str]) -> str:
    """``text`` with the folders named as the task names them."""
    for root in roots:
        text = text.replace(f"{workdir()}/{root}", f"/{root}")
    return text


def _shell(command: str, timeout_s: float) -> tuple[int | None, str]:
    """(exit status or None at the time limit, output); the process group is killed at the limit."""
    world = _world()
    base = world["base"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": base,
        "TMPDIR": base,
        "LANG": "C.UTF-8",
        **{key: _value(value, world["roots"], base) for key, value in world["env"].items()},
    }
    cwd = Path(base) / world["cwd"].lstrip("/")
    # a file and not a pipe: a background process that keeps a pipe open would hold the answer back
    with tempfile.TemporaryFile(dir=workdir()) as output:
        process = subprocess.Popen(
            [_SHELL, "-c", _translate(command, world["roots"], base)],
            cwd=cwd if cwd.is_dir() else base,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        output.seek(0)
        text = output.read(1 << 20).decode("utf-8", "replace")
    return code, _shown(text, world["roots"]).strip("\n")
