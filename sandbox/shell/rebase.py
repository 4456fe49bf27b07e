"""A Dockerfile for the engine's builder here: local base images, a label on every layer.

The classic builder knows no BuildKit syntax; here-documents and cache mounts are rewritten, what
cannot be is refused with its line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import TaskError
from sandbox.shell.dockerfile import Line, copy_words, expand, parse_dockerfile, shell_command

_FLAG = re.compile(r"^--(\w[\w-]*)(?:=(\S+))?\s+")
_UNKNOWN = {"RUN": ("mount", "security"), "COPY": ("chmod", "parents", "exclude"),
            "ADD": ("chmod", "checksum", "keep-git-dir", "exclude")}  # fmt: skip
_DROPPED = {"RUN": ("mount", "network"), "COPY": ("link",), "ADD": ("link",)}


@dataclass(frozen=True, slots=True)
class Rebased:
    """``text`` has one instruction a step; ``lines[i]`` is the original of step i + 1 (None: a
    label of ours). ``bases``: image as written -> local image."""

    text: str
    lines: tuple[Line | None, ...]
    bases: dict[str, str]


def rebased(path: Path, text: str, resolve: Callable[[str], str], label: str) -> Rebased:
    """``resolve`` maps an image's name to a local one (its errors come through). TaskError for what
    the builder does not know."""
    steps: list[tuple[str, Line | None]] = []
    bases: dict[str, str] = {}
    stages: set[str] = set()
    args: dict[str, str] = {}

    def local(name: str) -> str:
        wanted = expand(name, args)
        if wanted.lower() in stages or wanted == "scratch" or wanted.isdigit():
            return wanted
        if wanted not in bases:
            bases[wanted] = resolve(wanted)
        return bases[wanted]

    for line in parse_dockerfile(text):
        if line.word == "ARG" and not stages and not bases:
            name, _, value = line.rest.partition("=")
            args[name.strip()] = expand(value.strip().strip("\"'"), args)
        if line.word == "FROM":
            steps += [(_from(line, path, local, stages), line), (f"LABEL {label}", None)]
        elif line.word in ("RUN", "COPY", "ADD"):
            steps.append((_plain(line, path, local), line))
        else:
            steps.append((f"{line.word} {line.rest}", line))
    if not any(line is not None and line.word == "FROM" for _, line in steps):
        raise TaskError(f"{path}: no FROM line; an image starts from another one")
    return Rebased(
        "\n".join(step for step, _ in steps) + "\n", tuple(line for _, line in steps), bases
    )


def _from(line: Line, path: Path, local: Callable[[str], str], stages: set[str]) -> str:
    words = [word for word in line.rest.split() if not word.startswith("--")]
    if not words or (len(words) > 1 and (len(words) != 3 or words[1].lower() != "as")):
        raise TaskError(f"{path}:{line.number}: FROM {line.rest}: expected FROM IMAGE [AS NAME]")
    found = local(words[0])
    if len(words) == 3:
        stages.add(words[2].lower())
    return " ".join(["FROM", found, *words[1:]])


def _plain(line: Line, path: Path, local: Callable[[str], str]) -> str:
    """RUN, COPY or ADD as the classic builder reads it."""
    rest, kept = line.rest, ""
    while found := _FLAG.match(rest):
        name, value = found[1], found[2] or ""
        rest = rest[found.end() :]
        if name == "from":
            kept += f"--from={local(value)} "
        elif (
            name in _DROPPED[line.word]
            and "type=secret" not in value
            and (name != "mount" or "type=cache" in value or "type=tmpfs" in value)
        ):
            continue  # a cache, a network or a way of linking: the layer is the same without
        elif name in _UNKNOWN[line.word]:
            raise TaskError(
                f"{path}:{line.number}: {line.word} --{name} is BuildKit's, which builds here do "
                "without; write it as plain RUN and COPY lines"
            )
        else:
            kept += found[0].strip() + " "
    if not line.body:
        return f"{line.word} {kept}{rest}"
    if line.word != "RUN":
        raise TaskError(
            f"{path}:{line.number}: {line.word} of a here-document is BuildKit's, which builds "
            "here do without; put the text into a file beside the Dockerfile and copy that"
        )
    script = shell_command(Line(line.number, "RUN", rest, line.end, line.body))
    return f"RUN {kept}{json.dumps(['/bin/sh', '-c', script])}"


def copied_roots(text: str, path: Path) -> list[str]:
    """Absolute targets of COPY and ADD and every WORKDIR, in order: the task's own folders."""
    found: list[str] = []
    workdir = "/"
    for line in parse_dockerfile(text):
        if line.word == "WORKDIR":
            workdir = str(Path(workdir) / line.rest.strip("\"'"))
            found.append(workdir)
        elif line.word in ("COPY", "ADD") and not line.body:
            target = copy_words(line, path)[-1]
            found.append(str(Path(workdir) / target))
    return [place for place in found if "$" not in place]


def shown(line: Line) -> str:
    """An instruction in at most 80 characters."""
    text = " ".join(shlex.split(line.rest, posix=False)) if line.word == "COPY" else line.rest
    return f"{line.word} {text}"[:80]
