"""The lines of a Dockerfile, and what of them a box without Docker can do."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sandbox.errors import TaskError

_INSTALLERS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|pip3?|uv|npm|pnpm|yarn|conda|cargo|gem|curl|wget|git\s+clone)\b"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction; ``number`` is the line it starts at."""

    number: int
    word: str
    rest: str


@dataclass(slots=True)
class Recipe:
    """``copies``: (source below the build context, absolute target); ``notes``: what is lost."""

    workdir: str = "/app"
    copies: list[tuple[str, str]] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parse_dockerfile(text: str) -> list[Line]:
    """Instructions with continued lines joined; comments are gone."""
    lines: list[Line] = []
    start, held = 0, ""
    for number, raw in enumerate(text.splitlines(), start=1):
        if raw.lstrip().startswith("#") or (not raw.strip() and not held):
            continue
        start = start or number
        if raw.rstrip().endswith("\\"):
            held += raw.rstrip()[:-1] + " "
            continue
        word, _, rest = (held + raw).strip().partition(" ")
        if word:
            lines.append(Line(start, word.upper(), rest.strip()))
        start, held = 0, ""
    return lines


def read_recipe(path: Path) -> Recipe:
    """What the Dockerfile does to the files; installing needs a network and is noted instead."""
    recipe = Recipe()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    for line in parse_dockerfile(text):
        match line.word:
            case "FROM":
                recipe.notes.append(
                    f"image {line.rest.split()[0] if line.rest else '?'} is not used: the box has "
                    "this machine's /usr (bash, coreutils, Python)"
                )
            case "WORKDIR":
                recipe.workdir = str(PurePosixPath(recipe.workdir) / line.rest.strip("\"'"))
            case "COPY" | "ADD":
                _copy(recipe, line, path)
            case "ENV":
                recipe.env.update(_env(line, path))
            case "RUN":
                _run(recipe, line)
            case "ARG" | "LABEL" | "EXPOSE" | "CMD" | "ENTRYPOINT" | "USER" | "SHELL":
                pass  # a box runs no server of the image, as nobody but its own user
            case _:
                recipe.notes.append(f"{path.name}:{line.number}: {line.word} is ignored")
    return recipe


def copy_words(line: Line, path: Path) -> list[str]:
    """Sources and target of a COPY or ADD, options left out."""
    try:
        words = json.loads(line.rest) if line.rest.startswith("[") else shlex.split(line.rest)
    except ValueError as error:
        raise TaskError(f"{path}:{line.number}: {line.word} {line.rest}: {error}") from error
    words = [word for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise TaskError(
            f"{path}:{line.number}: {line.word} {line.rest}: expected source and target"
        )
    return words


def _copy(recipe: Recipe, line: Line, path: Path) -> None:
    if "--from=" in line.rest:
        recipe.notes.append(f"{path.name}:{line.number}: {line.word} {line.rest} is ignored")
        return
    *sources, target = copy_words(line, path)
    absolute = str(PurePosixPath(recipe.workdir) / target)
    if target.endswith("/") or target == "." or len(sources) > 1:
        absolute += "/"
    recipe.copies += [(source, absolute) for source in sources]


def _env(line: Line, path: Path) -> dict[str, str]:
    try:
        words = shlex.split(line.rest)
    except ValueError as error:
        raise TaskError(f"{path}:{line.number}: ENV {line.rest}: {error}") from error
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _run(recipe: Recipe, line: Line) -> None:
    command = line.rest
    if command.startswith("["):
        command = shlex.join(json.loads(command))
    if _INSTALLERS.search(command):
        recipe.notes.append(f"RUN {command[:100]} is skipped: a box has no network to install from")
    else:
        recipe.run.append(f"cd {shlex.quote(recipe.workdir)} && {command}")
